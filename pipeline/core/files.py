"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.core import leftovers
from pipeline.core.errors import UsageError

_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write to a temporary name beside ``path``, fsync, rename. Parents are made. Raises OSError that names a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=leftovers.prefix(f".{path.name}"), dir=path.parent)
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
    temporary = f"{leftovers.prefix(f'.{name}')}{os.urandom(4).hex()}"
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


def expanded(path: str, told: str) -> Path:
    """The path with the home that a leading ``~`` stands for. Raises UsageError: ``told`` names a user who isn't."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = path.partition("/")[0]
        raise UsageError(f"{told}: {user} stands for the home of a user who isn't known here") from error


def asked_for(path: Path, told: str) -> Path:
    """The path of a file that a person asks for, as ``told``.

    A rename would put a file in the place of a device, a pipe or a link, and a misspelt folder would be made far away.

    Raises:
        UsageError: what stands there is no regular file, or its folder isn't there.
    """
    if not os.path.isdir(path.parent):  # noqa: PTH112  (False too where nobody may look)
        raise UsageError(f"{told}: there is no folder {path.parent}", hint=f"mkdir -p {shlex.quote(str(path.parent))}")
    with suppress(OSError):  # there is nothing yet, or writing says what is wrong
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise UsageError(f"{told}: {path} is {kind}, and only a regular file is replaced")
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
