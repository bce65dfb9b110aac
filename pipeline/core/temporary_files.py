"""Temporary files that name their owner process, so that those of killed processes can be removed.

A temporary file's name contains ``<computer>-<process>-<start time>`` in hexadecimal; the start time distinguishes a
reused process id. The computer part identifies host, boot and process namespace: files of processes elsewhere in a
shared folder are left alone until they are a day old.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_TEMPORARY_NAME = re.compile(r"\.(?P<computer>[0-9a-f]{7})-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)\.")
_NAME_BYTES = 100  # of the file's own name
_PROC = Path("/proc")  # not on macOS
_FOREIGN_S = 86_400.0  # age of a temporary file of another computer from which it counts as left


def temporary_prefix(name: str) -> str:
    """Return the prefix of a temporary file or folder for ``name``; ``tempfile`` adds random letters."""
    shortened = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f"{shortened}.{_computer()}-{os.getpid():x}-{_process_start(os.getpid()) or 0:x}."


def system_temporary_prefix(kind: str) -> str:
    """Return the prefix of a temporary folder in the system's temporary directory."""
    return temporary_prefix(f"paceline-{kind}")


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
    """Yield this user's temporary files."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY_NAME.search(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                yield Path(entry.path)


def _is_in_use(path: Path) -> bool:
    match = _TEMPORARY_NAME.search(path.name)
    assert match is not None
    if match["computer"] != _computer():
        with suppress(OSError):
            return time.time() - path.lstat().st_mtime < _FOREIGN_S
        return False
    return _process_start(int(match["pid"], 16)) == int(match["start"], 16)


def _process_start(pid: int) -> int | None:
    """Return the start time of a process in the system's unit; None if the process has ended, also as a zombie."""
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
    """Return a short id of host, boot and process namespace: processes with equal ids can see each other."""
    identity = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            identity.append(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):
        identity.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  (no path: pid:[4026531836])
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:7]
