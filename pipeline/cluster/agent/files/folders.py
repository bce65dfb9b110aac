"""Unpack tars into folders of this node, completely or not at all, and remove folders: runs, data packs, wheels."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from ..node import own_node, sha256_of_rest
from ..requests import CleanRequest, PutPackRequest, PutWheelsRequest
from ..running.processes import start_time
from ..wire import read_json, say

FOREIGN_S = 86400.0  # age after which an unfinished folder of another host (homes on NFS) counts as abandoned
TRIED_BYTES = 64 << 10  # written and removed again, to try a folder
_REPORT_S = 1.0


def try_writing(workdir: str) -> None:
    """Write and remove a file, so that a missing, full or read-only home fails at once. Raises OSError, SystemExit."""
    if not os.path.isabs(workdir):
        raise SystemExit(f"has no home for this login (HOME is not set), so {workdir} is nowhere; set cluster.workdir")
    make_folder(workdir)
    path = os.path.join(workdir, f".try-{os.urandom(4).hex()}")
    try:
        with open(path, "xb") as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = path  # errors of ``write`` don't name their file
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def make_folder(folder: str) -> None:
    """Create a folder. Raises SystemExit: something else is in its place. OSError: it may not be created."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise SystemExit(f"can't make the folder {folder} there ({error.strerror}); set cluster.workdir") from error


class Incoming:
    """A stream that counts the bytes read, and reports them to the controller each second, for its progress line."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.bytes, self.reported_at = stream, 0, time.monotonic()

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.bytes += len(data)
        now = time.monotonic()
        if now - self.reported_at >= _REPORT_S:
            self.reported_at = now
            say(received=self.bytes)
        return data


def unpack(stream: BinaryIO, folder: str, check: Callable[[str], None] = lambda _: None) -> None:
    """Extract a tar to ``folder``, which appears complete and checked or not at all. Raises OSError, SystemExit."""
    import tarfile  # for requests that carry files: most don't

    with staged(folder) as temporary:
        try:
            with tarfile.open(fileobj=Incoming(stream), mode="r|*") as archive:  # type: ignore[call-overload]
                if hasattr(tarfile, "data_filter"):  # not in Python 3.9's first releases
                    archive.extractall(temporary, filter="data")
                else:
                    archive.extractall(temporary)
        except tarfile.TarError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
        check(temporary)


@contextlib.contextmanager
def staged(folder: str) -> Iterator[str]:
    """Yield a temporary folder, which becomes ``folder`` if the block succeeds, and is removed otherwise."""
    parent = os.path.dirname(folder)
    make_folder(parent)
    # the name says which process fills the folder, so that others can tell whether it still does (``is_unpacking``)
    maker = f"{socket.gethostname()}-{os.getpid()}-{start_time(os.getpid())}"
    temporary = os.path.join(parent, f".staging-{maker}-{os.urandom(4).hex()}")
    os.mkdir(temporary, 0o700)
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        os.rename(temporary, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process has put the same content there meanwhile
            error.filename = error.filename or folder
            raise
    finally:
        remove_tree(temporary)


def put_wheels(request: PutWheelsRequest) -> None:
    folder = os.path.expanduser(request.folder)
    shutil.rmtree(folder, ignore_errors=True)
    unpack(sys.stdin.buffer, folder)
    say(folder=folder)


def clean(request: CleanRequest) -> None:
    """Remove this node's folders of a run."""
    remove_ours(own_node(request.nodes, request.access).own_folders)
    say(cleaned=True)


def holds_unfetched(folder: str) -> bool:
    """Return whether the folder holds outputs that could not be fetched, which ``results.mark_to_stay`` has marked."""
    return bool(glob.glob(os.path.join(glob.escape(folder), "work", "node*-left")))


def remove_ours(folders: Iterable[str]) -> None:
    """Remove folders that ``start`` has marked as its own, unless they hold outputs that the user may need."""
    for folder in folders:
        if os.path.exists(os.path.join(folder, ".paceline")) and not holds_unfetched(folder):
            remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder, and its parent if nothing else is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(folder))


def remove_half_unpacked(workdir: str) -> None:
    """Remove temporary folders of processes that died while they unpacked."""
    runs = glob.glob(os.path.join(glob.escape(workdir), "runs", "*"))
    for parent in [os.path.join(workdir, "data"), *runs]:
        for folder in glob.glob(os.path.join(glob.escape(parent), ".staging-*")):
            if not is_unpacking(folder):
                remove_tree(folder)


def is_unpacking(folder: str) -> bool:
    """Return whether the process named in a temporary folder still fills it; if it is on another host, guess by age."""
    maker = re.fullmatch(r"\.staging-(.+)-(\d+)-([^-]+)-\w+", os.path.basename(folder))
    if maker and maker.group(1) == socket.gethostname():
        return start_time(int(maker.group(2))) == maker.group(3)
    return idle_s(folder) < FOREIGN_S


def idle_s(folder: str) -> float:
    """Return the seconds since a supervisor, a controller or a rank (by a checkpoint) last used the folder."""
    times = [0.0]
    for name in ("", "agent", "agent/beat", "agent/lease", "checkpoints"):
        with contextlib.suppress(OSError):
            times.append(os.path.getmtime(os.path.join(folder, name)))
    return time.time() - max(times)


def holds_pack(folder: str, digest: str) -> bool:
    """Return whether ``folder`` has the manifest of the data pack with this digest, and all files in full size."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("digest") != digest:
        return False
    try:
        sizes = manifest.get("files")
        if not sizes:  # arrays of fixed size; only packs of encoded images list their files
            count, height, width = manifest["count"], manifest["height"], manifest["width"]
            sizes = {"images.bin": count * manifest["channels"] * height * width, "labels.bin": count * 8}
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in sizes.items())
    except (KeyError, TypeError, AttributeError, OSError):
        return False


def put_pack(request: PutPackRequest) -> None:
    """Unpack the data pack from the tar on stdin to ``workdir/data/<digest>``, once, completely."""
    folder = os.path.join(os.path.expanduser(request.workdir), "data", request.pack_digest)
    if os.path.isdir(folder) and not holds_pack(folder, request.pack_digest):
        shutil.rmtree(folder)

    def check(unpacked: str) -> None:
        if not holds_pack(unpacked, request.pack_digest) or not has_digests(unpacked):
            raise SystemExit(f"the data pack arrived damaged in {folder}")

    if not os.path.isdir(folder):
        unpack(sys.stdin.buffer, folder, check)
    say(pack_path=folder)


def has_digests(folder: str) -> bool:
    """Return whether every file of a data pack has the sha256 in its manifest."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    digests = manifest.get("sha256") if isinstance(manifest, dict) else None
    for name, sha256 in (digests or {}).items():
        with open(os.path.join(folder, name), "rb") as file:
            if sha256_of_rest(file) != sha256:
                return False
    return True


def link_pack(run_dir: str, data_dir: str) -> None:
    """Link ``run_dir/data`` to the data pack. Raises SystemExit: it is missing."""
    link = os.path.join(run_dir, "data")
    if not os.path.lexists(link):
        os.symlink(data_dir, link)
    if not os.path.exists(os.path.join(link, "manifest.json")):
        raise SystemExit(f"the data pack is missing: no manifest.json in {data_dir}; the same command makes it again")
