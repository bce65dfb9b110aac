"""Files that appear whole or not at all, their digests and stamps, and temporary files that say whose they are.

The name of a temporary file holds ``<computer>-<process>-<start time>``, each in hexadecimal: a killed process can't
tidy up, and one that was given its number later has another start time. The computer part stands for host, boot and
process namespace, so what a process elsewhere has in a shared folder isn't judged here (but for what is older than a
day).
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core.errors import UsageError

_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write to a temporary name beside ``path``, fsync, rename. Parents are made. Raises OSError that names a file."""
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
        if isinstance(error, OSError) and error.filename is None:  # a write to an open file doesn't say to which
            error.filename = str(path)
        raise


def write_json_in(folder: int, name: str, value: Any) -> None:
    """``write_json`` into the folder that a descriptor is open on, whatever has its path by now.

    Raises:
        FileNotFoundError: the folder was removed.
        OSError: it can't be written.
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
    """The path with the home that a leading ``~`` stands for. Raises UsageError: ``option`` names a user who isn't."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = path.partition("/")[0]
        raise UsageError(f"{option}: {user} stands for the home of a user who isn't known here") from error


def replaceable_path(path: Path, option: str) -> Path:
    """The path of a file that ``option`` names.

    A rename would put a file in the place of a device, a pipe or a link, and a misspelt folder would be made far away.

    Raises:
        UsageError: what stands there is no regular file, or its folder isn't there.
    """
    if not os.path.isdir(path.parent):  # noqa: PTH112  (False too where nobody may look)
        raise UsageError(
            f"{option}: there is no folder {path.parent}", hint=f"mkdir -p {shlex.quote(str(path.parent))}"
        )
    with suppress(OSError):  # there is nothing yet, or writing says what is wrong
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise UsageError(f"{option}: {path} is {kind}, and only a regular file is replaced")
    return path


def fsync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """``write_atomic`` of indented JSON; keys keep their order."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces; NaN is refused. What digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    """Hex digest of the UTF-8 text."""
    return sha256_bytes(text.encode())


def sha256_bytes(data: bytes) -> str:
    """Hex digest of bytes in memory."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hint(error: OSError, folder: Path) -> str:
    """The hint for an error of writing below ``folder``, which holds runs."""
    elsewhere = "then the same command; or paths.runs=<another folder>"
    if error.errno not in FULL:
        return f"make room or fix its permissions, {elsewhere}"
    return room_needed(folder)


def _no_inodes(disk: os.statvfs_result) -> bool:
    return disk.f_files > 0 and disk.f_favail == 0  # some file systems count none


def room_needed(folder: Path) -> str:
    """The hint where the disk of ``folder``, which holds runs, is full: its free bytes, and who knows what may go."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    disk, free = os.statvfs(there), f"{shutil.disk_usage(there).free:,} bytes are free"
    room = f"which has no inodes left for new files (df -i), though {free}" if _no_inodes(disk) else f"of which {free}"
    return (
        f"make room on the disk of {there}, {room} "
        "(doit clean shows which runs may go), then the same command; or paths.runs=<a folder on another disk>"
    )


_TICK_NS = 20_000_000  # a file system's clock moves on in steps of up to 10 ms,
_SECONDS_NS = 2_500_000_000  # or in whole seconds (HFS+, ext3, many a network's)


def settles_in(changed_ns: int) -> float:
    """For how many seconds from now a second writing may still leave the same stamp; 0: none can.

    Args:
        changed_ns: the file's change time (unix time in ns). One that is still to come is of another clock, of which
            nobody knows how late it is: infinite.
    """
    age_ns = time.time_ns() - changed_ns
    if age_ns < 0:
        return math.inf
    return max(0, (_TICK_NS if changed_ns % 1_000_000 else _SECONDS_NS) - age_ns) / 1e9


def refuse_odd_pattern(pattern: str, option: str) -> None:
    """Raises UsageError, which begins with ``option``: no name at all, or ``**`` beside other letters, for which some
    versions of pathlib raise ValueError and others take a single star."""
    parts = PurePosixPath(pattern).parts
    if not parts or "\0" in pattern:
        raise UsageError(f"{option} names no file")
    if any("**" in part and part != "**" for part in parts):
        raise UsageError(f"{option}: ** stands for folders at any depth, with nothing beside it", hint="raw/**/a*.csv")


_TEMPORARY_NAME = re.compile(r"\.(?P<place>[0-9a-f]{7})-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)\.")
_NAME_BYTES = 100  # bytes that are kept of a file's own name
_PROC = Path("/proc")  # not on macOS
_FOREIGN_S = 86_400.0


def temporary_prefix(name: str) -> str:
    """How a temporary file or folder for ``name`` begins; ``tempfile`` adds its own letters."""
    own = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f"{own}.{_computer()}-{os.getpid():x}-{_process_start(os.getpid()) or 0:x}."


def system_temporary_prefix(kind: str) -> str:
    """The same for a folder in the system's place for temporary files."""
    return temporary_prefix(f"paceline-{kind}")


def remove_leftovers(folders: Iterable[Path]) -> list[Path]:
    """Remove from these folders (not from those inside) what a process that is gone has left; what was removed."""
    left = [path for folder in folders for path in _of_mine(folder) if not _is_in_use(path)]
    for path in left:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return left


def remove_system_leftovers() -> list[Path]:
    """The same where the system has temporary files: ``/tmp/paceline-*``."""
    return remove_leftovers({Path(tempfile.gettempdir()), Path("/tmp")})


def _of_mine(folder: Path) -> Iterator[Path]:
    """Temporary files of this user's."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY_NAME.search(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                yield Path(entry.path)


def _is_in_use(path: Path) -> bool:
    match = _TEMPORARY_NAME.search(path.name)
    assert match is not None
    if match["place"] != _computer():
        with suppress(OSError):
            return time.time() - path.lstat().st_mtime < _FOREIGN_S
        return False
    return _process_start(int(match["pid"], 16)) == int(match["start"], 16)


def _process_start(pid: int) -> int | None:
    """When the process began, in the system's own unit; None: there is none (one that was not waited for has ended)."""
    if _PROC.is_dir():
        try:
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
    """This computer since it was started, as far as its processes can see each other."""
    identity = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            identity.append(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):
        identity.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  (no path: pid:[4026531836])
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:7]
