"""The lock of a run: one command at a time writes into its folder."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core import cache, leftovers
from pipeline.core.errors import Killed, PacelineError, TrainingError
from pipeline.core.signals import Stop
from pipeline.runs import misplaced
from pipeline.runs.folder import RunFolder

_POLL_S = 0.2
_WRITTEN_IN = ("evaluation", "checkpoints")


class RunLock:
    """Held until ``release`` or the end of the process, however it ends: the kernel frees it.

    Who removes the folder of runs removes the lock's file too, and the next command makes and locks another one. So a
    command that holds the lock has to ask, before it writes, whether the file at the path is still the one it holds.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._held: int | None = None

    def take(self) -> bool:
        """False: another command holds it. Raises OSError, PacelineError: a directory is in its place."""
        while (descriptor := self._locked()) is not None:
            if _is_at(descriptor, self._folder.lock):
                self._held = descriptor
                return True
            os.close(descriptor)  # its file was removed meanwhile: this lock guards nothing
        return False

    def _locked(self) -> int | None:
        """The lock's file, made where it is missing, open and locked."""
        self._folder.lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
        except IsADirectoryError:
            path = self._folder.lock
            raise PacelineError(
                f"{path} is a directory; it has to be a file, the lock of run {self._folder.key}",
                hint=f"rm -r {shlex.quote(str(path))}, then the same command",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return descriptor

    def release(self) -> None:
        """Does nothing where it isn't held."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def lost(self) -> bool:
        """Whether the file at the path is no longer the one that is held."""
        return self._held is None or not _is_at(self._held, self._folder.lock)

    def check(self) -> None:
        """Raises TrainingError when nothing more may be written: another command may be at work there."""
        if self.lost():
            raise TrainingError(
                f"{self._folder.lock}, the lock of run {self._folder.key}, was removed while the run was going on "
                f"(rm -r {shlex.quote(str(self._folder.path.parent))} does that); nothing more is written",
                hint="the same command again",
            )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there, held = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def is_held(folder: RunFolder) -> bool:
    """Whether a command works on the run now. Raises OSError."""
    try:
        descriptor = os.open(folder.lock, os.O_RDONLY | os.O_NONBLOCK)  # a look needs no right to write
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(folder: RunFolder, say: Callable[[str], None], stop: Stop | None = None) -> Iterator[RunLock]:
    """The only one to write into the folder; waits for another command. What killed ones left half written is removed.

    Raises:
        UsageError: a newer Paceline wrote the folder.
        Killed: ``stop`` was told meanwhile.
        PacelineError: a directory is in the place of the lock.
        OSError: the folder of runs can't be written.
    """
    folder.refuse_newer()
    lock = RunLock(folder)
    if not lock.take():
        say(f"another command is training {folder.key}; waiting for it")
        while not lock.take():
            if stop is not None and stop.told:
                raise Killed(f"stopped by {stop.by} while it waited for another command")
            time.sleep(_POLL_S)
    try:
        runs_dir = folder.path.parent
        inside = (folder.path / name for name in _WRITTEN_IN)
        leftovers.remove([runs_dir, runs_dir / cache.FOLDER, folder.path, *inside])
        leftovers.remove_of_system()
        for line in misplaced.set_aside(folder.path):
            say(line)
        yield lock
    finally:
        lock.release()
