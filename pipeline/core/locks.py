"""Locks on files. The kernel frees a lock when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1
_taken: set[FileLock] = set()


class FileLock:
    """An exclusive lock on a file that is made where it is missing, and never removed; held until ``release``.

    Somebody else may remove the file (``rm -r`` of the folder), and the next command makes and locks another one. So a
    holder has to ask, before it writes, whether the file at the path is still the one that it holds: ``lost``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    def take(self) -> bool:
        """False: somebody else holds it. Raises OSError."""
        while (descriptor := _locked(self.path)) is not None:
            if _is_at(descriptor, self.path):
                self._held = descriptor
                _taken.add(self)
                return True
            os.close(descriptor)  # its file was removed meanwhile: this lock guards nothing
        return False

    def wait(self, *, timeout_s: float = math.inf, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Take it as soon as it is free; ``meanwhile`` is called about ten times a second.

        Raises:
            TimeoutError: somebody else held it for ``timeout_s``.
            OSError: the file can't be made or opened.
        """
        until = time.monotonic() + timeout_s
        while not self.take():
            if time.monotonic() >= until:
                raise TimeoutError(f"another process has held {self.path} for {timeout_s:g} s")
            meanwhile()
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Does nothing where it isn't held."""
        if self._held is not None:
            fcntl.flock(self._held, fcntl.LOCK_UN)  # at once, though a copy of this process may have it open still
            self.leave()

    def leave(self) -> None:
        """In a copy of the process that holds it, which goes on holding it. Does nothing where it isn't held."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
            _taken.discard(self)

    def lost(self) -> bool:
        """Whether the file at the path is no longer the one that is held."""
        return self._held is None or not _is_at(self._held, self.path)


def _leave_all() -> None:
    for lock in [*_taken]:
        lock.leave()


os.register_at_fork(after_in_child=_leave_all)  # a copy that lives on would hold them for a command that has ended


@contextmanager
def held(path: Path, *, timeout_s: float = math.inf, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """The block runs alone among all that name this file. Raises what ``FileLock.wait`` does."""
    lock = FileLock(path)
    lock.wait(timeout_s=timeout_s, meanwhile=meanwhile)
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether somebody holds it now; a look makes no file and needs no right to write. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting. False: somebody else holds it. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked(path: Path) -> int | None:
    """The file, made where it is missing, open and locked."""
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
    try:
        there, held_one = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (held_one.st_dev, held_one.st_ino)
