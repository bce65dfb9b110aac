"""Folders of runs and data packs on this node: unpacked completely, sent back, and removed."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator

from ..node import own_node
from ..wire import TYPE_CHECKING, Json, read_json, say
from .processes import start_time
from .registry import forget_dead

if TYPE_CHECKING:
    import tarfile
    from typing import BinaryIO

FOREIGN_S = 86400.0
TRIED_BYTES = 64 << 10
_REPORT_S = 1.0
MOST_NAMES, LONGEST_NAME = 100, 400  # in an answer
LEADS_OUT = "a link that leads out of the run folder"
NO_FILES = (LEADS_OUT, "a pipe", "a socket", "a device", "it was removed meanwhile")  # with nothing to keep


def holds_pack(folder: str, digest: str) -> bool:
    """Whether ``folder`` is the complete data pack: its digest, and the sizes that the manifest implies."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("digest") != digest:
        return False
    try:
        sizes = manifest.get("files") or image_sizes(manifest)
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in sizes.items())
    except (KeyError, TypeError, AttributeError, OSError):
        return False


def image_sizes(manifest: Json) -> Json:
    """Return the sizes of the files in a pack of images, in bytes. Raises KeyError, TypeError."""
    count = manifest["count"]
    image_bytes = manifest["channels"] * manifest["height"] * manifest["width"]
    return {"images.bin": count * image_bytes, "labels.bin": count * 8}


def free_bytes(folder: str) -> int:
    """Return the free space on the disk of a folder, which need not exist."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: str) -> str:
    """Return the folder, or the nearest one above it that exists."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def no_inodes(folder: str) -> bool:
    """Whether its disk takes no further file, however many bytes are free."""
    status = os.statvfs(existing(folder))
    return status.f_files > 0 and status.f_favail == 0


def room_in(folder: str) -> str:
    """Describe the free space on the disk of a folder, which need not exist."""
    free = f"{free_bytes(folder)} bytes are free there"
    return f"no inodes are left there for new files (df -i), though {free}" if no_inodes(folder) else free


def try_writing(workdir: str) -> None:
    """Write there as a start will, so that a missing, full or read-only home is reported before anything starts.

    Raises OSError, SystemExit.
    """
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
        error.filename = path  # an error of writing has no name
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


def clean(request: Json) -> None:
    """Remove this node's folders of a run; only folders that ``start`` made, which hold its stamp."""
    remove_ours(own_node(request)["remove"])
    say(cleaned=True)


def holds_left(folder: str) -> bool:
    """Whether a script's files that were too large to fetch stay there, as its user was informed."""
    return bool(glob.glob(os.path.join(glob.escape(folder), "work", "node*-left")))


def remove_ours(folders: list[str]) -> None:
    for folder in folders:
        if os.path.exists(os.path.join(folder, ".paceline")) and not holds_left(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(folder))


def remove_left(request: Json, node: Json) -> None:
    """Remove half-unpacked files of dead processes below the workdir, and the folders of earlier attempts of this run.

    The controller decides about other runs (pipeline/cluster/earlier.py).
    """
    runs = os.path.dirname(os.path.dirname(node["run_dir"]))
    remove_half_unpacked(os.path.dirname(runs))
    for folder in glob.glob(os.path.join(glob.escape(runs), "*", "node*")):
        run_id = os.path.basename(os.path.dirname(folder))
        if run_id.startswith(request["attempts"]) and run_id != request["run_id"] and not holds_left(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # it isn't empty
                os.rmdir(os.path.dirname(folder))
    forget_dead(request)


def remove_half_unpacked(workdir: str) -> None:
    """Remove folders that a dead process has not finished."""
    runs = glob.glob(os.path.join(glob.escape(workdir), "runs", "*"))
    for place in [os.path.join(workdir, "data"), *runs]:
        for folder in glob.glob(os.path.join(glob.escape(place), ".staging-*")):
            if not is_unpacking(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # it isn't empty
                    os.rmdir(place)


def is_unpacking(folder: str) -> bool:
    """Whether the process that fills this folder lives, by the folder's name; on another host only its age is known."""
    named = re.fullmatch(r"\.staging-(.+)-(\d+)-([^-]+)-\w+", os.path.basename(folder))
    if named and named.group(1) == socket.gethostname():
        return start_time(int(named.group(2))) == named.group(3)
    return idle_s(folder) < FOREIGN_S


def idle_s(folder: str) -> float:
    """Return the seconds since the last write.

    A living supervisor writes twice per second, and so does an agent that a controller follows.
    """
    times = [0.0]
    for name in ("", "agent", "agent/beat", "agent/lease", "checkpoints"):
        with contextlib.suppress(OSError):
            times.append(os.path.getmtime(os.path.join(folder, name)))
    return time.time() - max(times)


class Incoming:
    """A stream that reports each second how many bytes have arrived."""

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
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(temporary, filter="data")
                else:
                    archive.extractall(temporary)
        except tarfile.TarError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
        check(temporary)


@contextlib.contextmanager
def staged(folder: str) -> Iterator[str]:
    """A temporary folder that becomes ``folder`` at the end, and is removed otherwise."""
    parent = os.path.dirname(folder)
    make_folder(parent)
    maker = f"{socket.gethostname()}-{os.getpid()}-{start_time(os.getpid())}"
    temporary = os.path.join(parent, f".staging-{maker}-{os.urandom(4).hex()}")
    os.mkdir(temporary, 0o700)
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        os.rename(temporary, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else another process has put the same thing there
            error.filename = error.filename or folder  # an error of writing has no name
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # it isn't empty
            os.rmdir(parent)


def pack_folder(request: Json) -> str:
    """Return the data pack's place; anything there that isn't the pack is removed."""
    folder = os.path.join(os.path.expanduser(request["workdir"]), "data", request["pack_digest"])
    if os.path.isdir(folder) and not holds_pack(folder, request["pack_digest"]):
        shutil.rmtree(folder)
    return folder


def put_pack(request: Json) -> None:
    """Unpack the data pack from the tar on stdin to ``workdir/data/<digest>``, once, completely."""
    folder = pack_folder(request)

    def check(unpacked: str) -> None:
        if not holds_pack(unpacked, request["pack_digest"]) or not has_digests(unpacked):
            raise SystemExit(f"the data pack arrived damaged in {folder}")

    if not os.path.isdir(folder):
        unpack(sys.stdin.buffer, folder, check)
    say(pack_path=folder)


def has_digests(folder: str) -> bool:
    """Whether every file of a data pack has the sha256 in the manifest."""
    import hashlib  # here: no other request hashes, and OpenSSL takes a fifth of an agent's start

    manifest = read_json(os.path.join(folder, "manifest.json"))
    for name, sha256 in (manifest.get("sha256") or {}).items() if isinstance(manifest, dict) else ():
        digest = hashlib.sha256()
        with open(os.path.join(folder, name), "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != sha256:
            return False
    return True


def settle_pack(run_dir: str, data_dir: str, digest: str) -> None:
    """Move a pack that was sent with the run to its own place, and link ``run_dir/data`` to it."""
    arrived = os.path.join(run_dir, "pack")
    if os.path.isdir(arrived):
        os.makedirs(os.path.dirname(data_dir), exist_ok=True)
        if not holds_pack(data_dir, digest):
            shutil.rmtree(data_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # another node of a shared home was quicker
                os.rename(arrived, data_dir)
        shutil.rmtree(arrived, ignore_errors=True)
    link = os.path.join(run_dir, "data")
    if not os.path.lexists(link):
        os.symlink(data_dir, link)
    if not os.path.exists(os.path.join(link, "manifest.json")):
        raise SystemExit(f"the data pack is missing: no manifest.json in {data_dir}; the same command makes it again")


def collect(request: Json) -> None:
    """Send the named files of the run folder as a tar after one answer line.

    With ``until_s``, files written later are left out, because they may be incomplete; with ``settled_s``, files of the
    last seconds. Files that ``given`` (a file of the run folder) lists are left out unless altered. ``work`` isn't sent
    if it is larger than ``limit_bytes``; then it is marked to stay, and the answer says so. Links to files are sent as
    files, because the controller accepts nothing else. A second answer line, after the tar, names the files that could
    not be sent and why; at the end of an attempt they stay here.
    """
    import tarfile  # for requests that carry files: most don't

    run_dir, until_s = own_node(request)["run_dir"], request.get("until_s")
    if request.get("settled_s"):
        until_s = time.time() - request["settled_s"]
    given = read_json(os.path.join(run_dir, request["given"])) if request.get("given") else None
    stamps = given if isinstance(given, dict) else {}

    def is_wanted(name: str, state: os.stat_result) -> bool:
        if name.startswith("work/") and os.path.islink(os.path.join(run_dir, name)):
            return False  # such as data that a script has linked into its working directory
        if until_s is not None and state.st_mtime > until_s:
            return False
        return bool(stamps.get(name) != [state.st_size, state.st_mtime_ns])

    patterns, answer = [*request["patterns"]], {}
    work = [
        path for pattern in request.get("work") or [] for path in glob.glob(os.path.join(glob.escape(run_dir), pattern))
    ]
    size = sum(size_of_new(path, run_dir, stamps) for path in work)
    if request.get("limit_bytes") is not None and size > request["limit_bytes"]:
        for path in work:
            open(f"{os.path.dirname(path)}-left", "a").close()
        answer = {"left_bytes": size}
    else:
        patterns += request.get("work") or []
    say(tar=True, **answer)
    unsent: dict[str, str] = {}
    with tarfile.open(
        fileobj=sys.stdout.buffer, mode="w|", dereference=True
    ) as archive:  # also sends the content of hard links
        for pattern in patterns:
            for matched in sorted(glob.glob(os.path.join(glob.escape(run_dir), pattern))):
                for name, kind in below(run_dir, os.path.relpath(matched, run_dir), unsent):
                    send(archive, run_dir, name, kind, is_wanted, unsent)
    sys.stdout.buffer.flush()
    if until_s is None and any(why not in NO_FILES for why in unsent.values()):
        for path in work:
            open(f"{os.path.dirname(path)}-left", "a").close()
    say(unsent={name[:LONGEST_NAME]: unsent[name] for name in sorted(unsent)[:MOST_NAMES]}, unsent_count=len(unsent))


def send(
    archive: tarfile.TarFile,
    run_dir: str,
    name: str,
    kind: str,
    is_wanted: Callable[[str, os.stat_result], bool],
    unsent: dict[str, str],
) -> None:
    """Add a folder or a file to the tar; note files that can't be opened.

    Raises OSError: the connection is closed, or the file was cut.
    """
    path = os.path.join(run_dir, name)
    if kind == "folder":
        archive.add(path, arcname=name, recursive=False)
        return
    try:  # it may have become a pipe meanwhile, which must not block
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        unsent[name] = "it was removed meanwhile"
        return
    except OSError as error:
        unsent[name] = str(error.strerror)
        return
    with file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            unsent[name] = kind_of(state.st_mode)
        elif is_wanted(name, state):
            item = archive.gettarinfo(arcname=name, fileobj=file)
            archive.addfile(item, file)


def below(run_dir: str, name: str, unsent: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and kind (``file``, ``folder``) of a file, or of a folder and its content.

    Links to folders and to nothing are skipped. Anything else, unreadable, or outside of the run folder is noted.
    """
    path = os.path.join(run_dir, name)
    try:
        is_link, mode = os.path.islink(path), os.stat(path).st_mode
        if stat.S_ISREG(mode):
            if is_link and not name.startswith("work/") and leads_out(path, run_dir):
                unsent[name] = LEADS_OUT
            else:
                yield name, "file"
        elif not stat.S_ISDIR(mode):
            unsent[name] = kind_of(mode)
        elif not is_link:
            inside = sorted(os.listdir(path))
            yield name, "folder"
            for one in inside:
                if one != "__pycache__":
                    yield from below(run_dir, os.path.join(name, one), unsent)
        elif leads_out(path, run_dir) and not name.startswith("work/"):
            unsent[name] = LEADS_OUT
    except FileNotFoundError:
        if not os.path.islink(path):
            unsent[name] = "it was removed meanwhile"
    except OSError as error:
        unsent[name] = str(error.strerror)


def leads_out(path: str, run_dir: str) -> bool:
    """Whether a link leads out of the run folder."""
    return not os.path.realpath(path).startswith(os.path.join(os.path.realpath(run_dir), ""))


def kind_of(mode: int) -> str:
    """Return what is in place of a file, in the words of trainers/script/outputs.py."""
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def size_of_new(top: str, run_dir: str, stamps: Json) -> int:
    """Return the bytes below a folder in files that are new or altered.

    Args:
        stamps: path in the run folder → size and time of the last write (ns), as trainers/script/workdir.py notes them.
    """
    total = 0
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                state = os.stat(path)
                stamp = [state.st_size, state.st_mtime_ns]
                if not os.path.islink(path) and stamps.get(os.path.relpath(path, run_dir)) != stamp:
                    total += state.st_size
    return total
