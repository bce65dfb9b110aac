"""File locks (flock) by which several commands on one computer share a run folder, a cache or a data set.

The kernel releases a lock when its holder ends, even by a crash.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1
_taken: set[FileLock] = set()  # all locks that this process holds


class FileLock:
    """An exclusive lock on a file, held until ``release``. The file is created if missing and never removed.

    After someone removed it (``rm -r`` of the folder), the next command creates and locks another file. So before a
    holder writes, it must check with ``lost`` that the path still leads to the locked file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    def take(self) -> bool:
        """Try to take the lock; False if another process holds it. Raises OSError."""
        while True:
            descriptor = _open_locked(self.path)
            if descriptor is None:
                return False
            if _is_at(descriptor, self.path):
                self._held = descriptor
                _taken.add(self)
                return True
            # Between opening and locking the file was removed, so this lock guards nothing: try the next file.
            os.close(descriptor)

    def wait(self, *, timeout_s: float = math.inf, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Take the lock as soon as it is free, calling ``meanwhile`` about ten times a second.

        Raises TimeoutError: another process held it for ``timeout_s``; OSError: the file can't be created or opened.
        """
        until = time.monotonic() + timeout_s
        while not self.take():
            if time.monotonic() >= until:
                raise TimeoutError(f"another process has held {self.path} for {timeout_s:g} s")
            meanwhile()
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Release the lock if held."""
        if self._held is not None:
            # close() alone wouldn't unlock it while a forked child has the same file open
            fcntl.flock(self._held, fcntl.LOCK_UN)
            self.leave()

    def leave(self) -> None:
        """Close the descriptor without unlocking: for a forked child, whose parent keeps the lock."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
            _taken.discard(self)

    def lost(self) -> bool:
        """Return True if the file at the path is no longer the locked one."""
        return self._held is None or not _is_at(self._held, self.path)


def _leave_all() -> None:
    for lock in [*_taken]:
        lock.leave()


# else a child that survives its command would keep the command's locks
os.register_at_fork(after_in_child=_leave_all)


@contextmanager
def held(path: Path, *, timeout_s: float = math.inf, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run the block under an exclusive lock on this file. Raises what ``FileLock.wait`` raises."""
    lock = FileLock(path)
    lock.wait(timeout_s=timeout_s, meanwhile=meanwhile)
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Return True if some process holds the lock. Creates no file and needs no write permission. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting; False if another process holds the lock. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_locked(path: Path) -> int | None:
    """Open and lock the file, creating it if missing; None if another process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if try_lock(descriptor):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if the path leads to the open file."""
    try:
        at_path, opened = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)
