"""Folders of runs and data packs on this node: unpacked completely, reported when they are left over, and removed."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator

from trainers.contract import run_folder
from trainers.contract.host_facts import LeftFolder

from ..node import identity, own_node, sha256_of_rest
from ..wire import TYPE_CHECKING, Json, read_json, say
from .processes import find_processes, start_time
from .registry import LONGEST_START_S, forget_dead

if TYPE_CHECKING:
    from typing import BinaryIO

FOREIGN_S = 86400.0  # age after which an unfinished folder of another host counts as dead
TRIED_BYTES = 64 << 10  # written and removed again, to try a folder
_REPORT_S = 1.0
HEARD_S = 60.0  # a controller that follows an attempt beats every second, also after its end
MOST_ROWS = 200


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


def try_writing(workdir: str) -> None:
    """Write and remove a file, so that a missing, full or read-only home is reported before anything starts.

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
    """Remove this node's folders of a run; only folders that ``start`` made, which have its marker file."""
    remove_ours(own_node(request)["remove"])
    say(cleaned=True)


def holds_unfetched(folder: str) -> bool:
    """Whether the folder has outputs that were too large to fetch, or can't be read, and stay there for the user."""
    return bool(glob.glob(os.path.join(glob.escape(folder), "work", "node*-left")))


def remove_ours(folders: list[str]) -> None:
    for folder in folders:
        if os.path.exists(os.path.join(folder, ".paceline")) and not holds_unfetched(folder):
            remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder, and its parent if nothing else is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(folder))


def remove_leftovers(request: Json, node: Json) -> None:
    """Remove half-unpacked files of dead processes below the workdir, and the folders of earlier attempts of this run.

    The controller decides about other runs (pipeline/cluster/earlier.py).
    """
    runs = os.path.dirname(os.path.dirname(node["run_dir"]))
    remove_half_unpacked(os.path.dirname(runs))
    for folder in glob.glob(os.path.join(glob.escape(runs), "*", "node*")):
        run_id = os.path.basename(os.path.dirname(folder))
        if run_id.startswith(request["attempts"]) and run_id != request["run_id"] and not holds_unfetched(folder):
            remove_tree(folder)
    forget_dead(request)


def remove_half_unpacked(workdir: str) -> None:
    """Remove folders that a dead process has not finished."""
    runs = glob.glob(os.path.join(glob.escape(workdir), "runs", "*"))
    for place in [os.path.join(workdir, "data"), *runs]:
        for folder in glob.glob(os.path.join(glob.escape(place), ".staging-*")):
            if not is_unpacking(folder):
                remove_tree(folder)


def is_unpacking(folder: str) -> bool:
    """Whether the process that fills this folder lives, by the folder's name; on another host only its age is known."""
    named = re.fullmatch(r"\.staging-(.+)-(\d+)-([^-]+)-\w+", os.path.basename(folder))
    if named and named.group(1) == socket.gethostname():
        return start_time(int(named.group(2))) == named.group(3)
    return idle_s(folder) < FOREIGN_S


def idle_s(folder: str) -> float:
    """Return the seconds since the last write.

    A living supervisor writes twice per second, and the stream to a connected controller once.
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
        remove_tree(temporary)


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


def put_wheels(request: Json) -> None:
    """Unpack a folder of wheels from the tar on stdin, in place of an earlier one."""
    folder = os.path.expanduser(request["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    unpack(sys.stdin.buffer, folder)
    say(folder=folder)


def has_digests(folder: str) -> bool:
    """Whether every file of a data pack has the sha256 in the manifest."""
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


def size_of_new(top: str, run_dir: str, file_states: Json) -> int:
    """Return the bytes below a folder in files that are new or altered.

    Args:
        file_states: path in the run folder → size and time of the last write (ns), noted by trainers/script/workdir.py.
    """
    total = 0
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.stat(path)
                now = [status.st_size, status.st_mtime_ns]
                if not os.path.islink(path) and file_states.get(os.path.relpath(path, run_dir)) != now:
                    total += status.st_size
    return total


# Leftovers of ended attempts: reported by the probe, removed when the controller says so.


def tidy_workdir(request: Json, workdir: str) -> tuple[LeftFolder, ...]:
    """For launchers that send files: test whether files can be written, and return the folders of old attempts."""
    if not request.get("writes"):
        return ()
    try_writing(workdir)
    forget_dead(request)
    return attempts_left(workdir, identity(request))


def attempts_left(workdir: str, me: str) -> tuple[LeftFolder, ...]:
    """Return the folders of attempts that no process uses."""
    folders = sorted(glob.glob(os.path.join(glob.escape(workdir), "runs", "*", "node*")))
    unused = [f for f in folders if is_run_name(run_name_of(f)) and not is_in_use(f, me) and not holds_unfetched(f)]
    return tuple(
        LeftFolder(
            name=run_name_of(folder),
            idle_s=idle_s(folder),
            holds_outputs=holds_outputs(folder),
            bytes=size_of_new(folder, folder, {}),
        )
        for folder in unused[:MOST_ROWS]
    )


def run_name_of(folder: str) -> str:
    """Return ``RUN ID/node0``."""
    return "/".join(folder.split("/")[-2:])


def is_run_name(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/node\d+", name) is not None


def is_in_use(folder: str, me: str) -> bool:
    """Whether its agent or a rank lives, it may be starting, or a controller was heard a moment ago.

    For a host that shares this home only the age is known.
    """
    entry = read_json(os.path.join(folder, "agent", "agent.json"))
    if not isinstance(entry, dict):
        return idle_s(folder) < LONGEST_START_S
    if start_time(entry["pid"]) == entry["born"]:
        return True
    if entry["identity"] != me:
        return idle_s(folder) < FOREIGN_S
    return bool(find_processes(entry["mark"], entry["state_dir"])) or idle_s(folder) < HEARD_S


def holds_outputs(folder: str) -> bool:
    ended = read_json(os.path.join(folder, "agent", "exit.json"))
    if isinstance(ended, dict) and ended.get("code") == 0:
        return True
    # whatever its name and depth: a script calls its checkpoints as it likes, and saves them where it stands
    if any(names for _, _, names in os.walk(os.path.join(folder, run_folder.CHECKPOINTS))):
        return True
    return any(map(wrote_there, glob.glob(os.path.join(glob.escape(folder), "work", "node*"))))


def wrote_there(place: str) -> bool:
    """Whether a script has written into its working directory."""
    given = read_json(os.path.join(place, run_folder.GIVEN))
    run_dir = os.path.dirname(os.path.dirname(place))
    return size_of_new(os.path.join(place, run_folder.ABOVE), run_dir, given if isinstance(given, dict) else {}) > 0


def remove_folders(request: Json) -> None:
    """Remove the named folders of this node unless they are in use, and what no process owns any more."""
    workdir, me = os.path.expanduser(request["workdir"]), identity(request)
    removed = []
    for name in request["folders"].get(me, []):
        folder = os.path.join(workdir, "runs", name)
        if is_run_name(name) and os.path.isdir(folder) and not is_in_use(folder, me):
            remove_tree(folder)
            removed += [] if os.path.isdir(folder) else [name]
    remove_half_unpacked(workdir)
    forget_dead(request)
    say(removed=removed)
