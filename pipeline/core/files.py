"""File operations of the whole controller half: atomic writes, digests, fingerprints, temporary files.

A file's *stamp* is its size, times and inode. As long as the stamp stays the same, the content does too, so the file
needn't be read again. This is only safe when the file system's clock has advanced since the last write: two writes
within one tick of the clock may leave equal stamps. A *fingerprint* is a stamp together with the content's sha256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pipeline.core.errors import DataError, UsageError

_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
FULL = (errno.ENOSPC, errno.EDQUOT)  # of OSError: the disk, or the user's share of it, is full

FINGERPRINTS = ".fingerprints.json"
"""The cache of ``fingerprints`` in a folder."""


class Stamp(NamedTuple):
    """What the file system records of a file; some field changes with every write or replacement. Times in ns."""

    size_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def stamp(path: Path) -> Stamp:
    """Return the stamp of a file. Raises OSError."""
    return Stamp.of(path.stat())


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a temporary file next to ``path``, fsync and rename it; create parent folders. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=temporary_prefix(f".{path.name}"), dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide results from a team
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # errors of write() don't name the file
            error.filename = str(path)
        raise


def write_json_in(folder: int, name: str, value: Any) -> None:
    """Like ``write_json``, but into an open folder (its descriptor), even if its path leads elsewhere by now.

    Raises FileNotFoundError: the folder was removed; OSError: the file can't be written.
    """
    temporary = f"{temporary_prefix(f'.{name}')}{os.urandom(4).hex()}"
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, dir_fd=folder)) as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def expanded(path: str, option: str) -> Path:
    """Expand a leading ``~``. Raises UsageError, which names ``option``, if the user is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = path.partition("/")[0]
        raise UsageError(f"{option}: {user} stands for the home of a user who isn't known here") from error


def replaceable_path(path: Path, option: str) -> Path:
    """Check that the output file ``path``, which the user named by ``option``, may be written, and return it.

    An atomic write would otherwise replace a device, pipe or link by a file, and create a misspelt folder. Raises
    UsageError: the path exists and isn't a regular file, or its folder doesn't exist.
    """
    if not os.path.isdir(path.parent):  # noqa: PTH112  (False also without permission)
        raise UsageError(
            f"{option}: there is no folder {path.parent}", hint=f"mkdir -p {shlex.quote(str(path.parent))}"
        )
    with suppress(OSError):  # there is no file yet, or the later write reports the problem
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise UsageError(f"{option}: {path} is {kind}, and only a regular file is replaced")
    return path


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source``, which must never be written to; copy it on file systems without links. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def fsync(path: Path) -> None:
    """Make the bytes of a file, or the entries of a folder, durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; keys keep their order."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def canonical_json(value: Any) -> str:
    """Serialize to one canonical text per value (sorted keys, no spaces, no NaN), for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    return sha256_bytes(text.encode())


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex digest of a file, read in blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hint(error: OSError, folder: Path) -> str:
    """Return the hint for a write error below ``folder``, which holds runs."""
    if error.errno in FULL:
        return room_needed(folder)
    if error.errno == errno.EROFS:
        return "name another folder: paths.runs=<a folder on a file system that isn't read-only>"
    return "make room or fix its permissions, then the same command; or paths.runs=<another folder>"


def room_needed(folder: Path) -> str:
    """Return the hint for a full disk of ``folder``, which holds runs: free bytes, and how to free more."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    disk, free = os.statvfs(existing), f"{shutil.disk_usage(existing).free:,} bytes are free"
    no_inodes = disk.f_files > 0 and disk.f_favail == 0  # f_files is 0 on file systems without inode counts
    room = f"which has no inodes left for new files (df -i), though {free}" if no_inodes else f"of which {free}"
    return (
        f"make room on the disk of {existing}, {room} "
        "(doit clean shows which runs may go), then the same command; or paths.runs=<a folder on another disk>"
    )


def refuse_odd_pattern(pattern: str, option: str) -> None:
    """Refuse empty glob patterns and ``**`` next to other characters. Raises UsageError, which begins with ``option``.

    Some versions of pathlib raise ValueError for such a ``**``, others treat it as a single star.
    """
    parts = PurePosixPath(pattern).parts
    if not parts or "\0" in pattern:
        raise UsageError(f"{option} names no file")
    if any("**" in part and part != "**" for part in parts):
        raise UsageError(f"{option}: ** stands for folders at any depth, with nothing beside it", hint="raw/**/a*.csv")


# ------------------------------------------------------------------------------- stamps and fingerprints
_TICK_NS = 20_000_000  # file system clocks advance in steps of up to 10 ms,
_SECONDS_NS = 2_500_000_000  # or in whole seconds (HFS+, ext3, many network file systems)


def settles_in(changed_ns: int) -> float:
    """Return for how many seconds the stamp of a file changed at this unix time (ns) is not yet reliable.

    During them another write could leave the same stamp. Infinite for a time in the future: another computer's clock
    has set it, with an unknown offset.
    """
    age_ns = time.time_ns() - changed_ns
    if age_ns < 0:
        return math.inf
    # a time without microseconds comes from a file system that counts in whole seconds
    tick_ns = _TICK_NS if changed_ns % 1_000_000 else _SECONDS_NS
    return max(0, tick_ns - age_ns) / 1e9


class FileFingerprint(NamedTuple):
    """The stamp of a file, and the sha256 of its content with this stamp."""

    stamp: Stamp
    sha256: str


def fingerprints(paths: Sequence[Path], cache_dir: Path) -> dict[Path, FileFingerprint]:
    """Return the fingerprint of each file; hash only files with changed stamps. Raises DataError, OSError.

    The cache lies in ``cache_dir`` and may be lost without harm; of two concurrent writers the last one wins.
    """
    cached = _read_fingerprints(cache_dir / FINGERPRINTS)
    fresh: dict[str, list[int | str]] = {}
    by_path: dict[Path, FileFingerprint] = {}
    for path in paths:
        earlier = cached.get(str(path))
        if earlier is not None and earlier.stamp == stamp(path):
            by_path[path] = earlier
        else:
            by_path[path] = fingerprint(path)
            fresh[str(path)] = [*by_path[path].stamp, by_path[path].sha256]
    if fresh and cache_dir.is_dir():
        rows = {name: [*earlier.stamp, earlier.sha256] for name, earlier in cached.items()}
        with suppress(OSError):  # files in a read-only folder can still be read
            write_json(cache_dir / FINGERPRINTS, {**rows, **fresh})
    return by_path


def fingerprint(path: Path) -> FileFingerprint:
    """Wait until the file's stamp is reliable, and return its fingerprint. Raises DataError, OSError."""
    before = stamp(path)
    unsettled_s = settles_in(before.ctime_ns)
    # any write after this wait changes the stamp; for a time in the future no wait would help
    if math.isfinite(unsettled_s):
        time.sleep(unsettled_s)
    sha256 = sha256_file(path)
    if stamp(path) != before:
        raise changing(path)
    return FileFingerprint(before, sha256)


def changing(path: Path) -> DataError:
    """Return the error for a file that was written to while it was read."""
    return DataError(f"{path} was changed while it was read", hint="the same command, when nothing writes to it")


def _read_fingerprints(path: Path) -> dict[str, FileFingerprint]:
    """Read the cache, ``{path: [*Stamp, sha256]}``; rows of another form are left out."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    rows = document.items() if isinstance(document, dict) else ()
    return {
        name: FileFingerprint(Stamp(*row[:-1]), str(row[-1]))
        for name, row in rows
        if isinstance(row, list) and len(row) == len(Stamp._fields) + 1
    }


# ------------------------------------------------------------------------------- temporary files
# The name of a temporary file says which process made it, so that others know whether it is still needed.
_TEMPORARY_NAME = re.compile(r"\.(?P<computer>[0-9a-f]{7})-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)\.")
_NAME_BYTES = 100  # of the final file's name that are kept: with the rest it must fit into 255
_PROC = Path("/proc")  # not on macOS
_FOREIGN_S = 86_400.0  # a file of another computer, whose processes can't be seen, is a leftover from this age


def temporary_prefix(name: str) -> str:
    """Return the prefix of a temporary file or folder for ``name``; ``tempfile`` adds random letters."""
    shortened = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f"{shortened}.{_computer()}-{os.getpid():x}-{_process_start(os.getpid()) or 0:x}."


def remove_leftovers(folders: Iterable[Path]) -> list[Path]:
    """Remove temporary files of ended processes from these folders (not recursively); return the removed paths."""
    leftovers = [path for folder in folders for path in _temporary_files(folder) if not _is_in_use(path)]
    for path in leftovers:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return leftovers


def remove_system_leftovers() -> list[Path]:
    """Remove leftovers from the system's temporary directory: ``/tmp/paceline-*``."""
    return remove_leftovers({Path(tempfile.gettempdir()), Path("/tmp")})


def _temporary_files(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY_NAME.search(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                yield Path(entry.path)


def _is_in_use(path: Path) -> bool:
    """Return True if the process that made this temporary file may still run."""
    match = _TEMPORARY_NAME.search(path.name)
    assert match is not None
    if match["computer"] != _computer():
        with suppress(OSError):
            return time.time() - path.lstat().st_mtime < _FOREIGN_S
        return False
    # a later process may have got the same pid: its start time differs
    return _process_start(int(match["pid"], 16)) == int(match["start"], 16)


def _process_start(pid: int) -> int | None:
    """Return the start time of a process in the system's unit; None if the process has ended, also as a zombie."""
    if _PROC.is_dir():
        try:
            # proc_pid_stat(5): after the name in parentheses come the state and, 19 fields later, the start time
            fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    import psutil  # on macOS alone

    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None


@cache
def _computer() -> str:
    """Return a short id of host, boot and process namespace: processes with equal ids can see each other."""
    identity = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            identity.append(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):
        identity.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  (no path: pid:[4026531836])
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:7]
