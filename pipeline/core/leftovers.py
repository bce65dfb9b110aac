"""Temporary files that say whose they are, and the removal of those whose process is gone.

A name holds ``<computer>-<process>-<start time>``, each in hexadecimal: a killed process can't tidy up, and one that
was given its number later has another start time. The computer part stands for host, boot and process namespace, so
what a process elsewhere has in a shared folder isn't judged here (but for what is older than a day).
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

_NAME = re.compile(r"\.(?P<place>[0-9a-f]{7})-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)\.")
_LONGEST = 100  # bytes that are kept of a file's own name
_PROC = Path("/proc")  # not on macOS
_FOREIGN_S = 86_400.0


def prefix(name: str) -> str:
    """How a temporary file or folder for ``name`` begins; ``tempfile`` adds its own letters."""
    own = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return f"{own}.{_place()}-{os.getpid():x}-{_started(os.getpid()) or 0:x}."


def of_system(kind: str) -> str:
    """The same for a folder in the system's place for temporary files."""
    return prefix(f"paceline-{kind}")


def remove(folders: Iterable[Path]) -> list[Path]:
    """Remove from these folders (not from those inside) what a process that is gone has left; what was removed."""
    left = [path for folder in folders for path in _of_mine(folder) if not _is_owned(path)]
    for path in left:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return left


def remove_of_system() -> list[Path]:
    """The same where the system has temporary files: ``/tmp/paceline-*``."""
    return remove({Path(tempfile.gettempdir()), Path("/tmp")})


def _of_mine(folder: Path) -> Iterator[Path]:
    """Temporary files of this user's."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.search(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                yield Path(entry.path)


def _is_owned(path: Path) -> bool:
    found = _NAME.search(path.name)
    assert found is not None
    if found["place"] != _place():
        with suppress(OSError):
            return time.time() - path.lstat().st_mtime < _FOREIGN_S
        return False
    return _started(int(found["pid"], 16)) == int(found["start"], 16)


def _started(pid: int) -> int | None:
    """When the process began, in the system's own unit; None: there is none (one that was not waited for has ended)."""
    if _PROC.is_dir():
        try:
            fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    import psutil

    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None


@cache
def _place() -> str:
    """This computer since it was started, as far as its processes can see each other."""
    told = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            told.append(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):
        told.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  (no path: pid:[4026531836])
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:7]
