"""The lock of a run, under which one command at a time writes into the run folder or removes it.

Also: `doit stop`'s request to the holder of the lock, runs that wait for busy hosts, the removal of a run folder."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipeline.core import cache, documents, locks
from pipeline.core.errors import Killed, PacelineError, TrainingError, os_reason
from pipeline.core.files import remove_leftovers, remove_system_leftovers, temporary_prefix, write_json
from pipeline.core.locks import FileLock
from pipeline.core.processes.signals import Stop
from pipeline.core.specs import UNDER_WAY, State
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder, refuse_links
from trainers.contract import run_folder

_FOLDERS_WITH_LEFTOVERS = ("evaluation", "checkpoints")


class RunLock(FileLock):
    """The lock of a run: a file beside its folder, so that removing the folder of runs removes the lock, too."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder.lock)
        self._folder = folder

    def take(self) -> bool:
        """Take the lock; False if another command holds it. Raises OSError, PacelineError."""
        runs_dir = self.path.parent
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PacelineError(
                f"the folder of runs {runs_dir} can't be made: {os_reason(error)}", hint="paths.runs=<another folder>"
            ) from error
        return super().take()

    def check(self) -> None:
        """Check that this command may still write. Raises TrainingError: the lock was removed, as `rm -r` of the folder
        of runs does, and another command may hold a new one."""
        if self.lost():
            raise TrainingError(
                f"{self.path}, the lock of run {self._folder.key}, was removed while the run was going on "
                f"(rm -r {shlex.quote(str(self.path.parent))} does that); nothing more is written",
                hint="the same command again",
            )


@contextmanager
def locked(folder: RunFolder, say: Callable[[str], None], stop: Stop | None = None) -> Iterator[RunLock]:
    """Hold the run's lock; wait while another command does. Then remove what killed commands left. ``stop``: the user's
    request to end this command. Raises UsageError, Killed, PacelineError, OSError."""
    folder.refuse_newer()
    lock = RunLock(folder)
    if not lock.take():
        say(f"another command is training {folder.key}; waiting for it")
        stopped_before_ns = _stop_time_ns(folder)
        lock.wait(meanwhile=lambda: _raise_if_stopped(stop, folder, stopped_before_ns))
    try:
        runs_dir = folder.path.parent
        inside = (folder.path / name for name in _FOLDERS_WITH_LEFTOVERS)
        remove_leftovers([runs_dir, runs_dir / cache.FOLDER, folder.path, *inside])
        remove_system_leftovers()
        refuse_links(folder.path)
        (folder.path / run_folder.STOP).unlink(missing_ok=True)  # it was meant for a command before this one
        yield lock
    finally:
        with suppress(OSError):
            (folder.path / run_folder.STOP).unlink(missing_ok=True)
        lock.release()


def _raise_if_stopped(stop: Stop | None, folder: RunFolder, stopped_before_ns: int) -> None:
    if stop is not None and stop.requested:
        raise Killed(f"stopped by {stop.by} while it waited for another command")
    if _stop_time_ns(folder) > stopped_before_ns:
        raise Killed(
            f"doit stop has ended {folder.key}; what only waited for it ends too",
            hint="the same command starts it again",
        )


def _stop_time_ns(folder: RunFolder) -> int:
    """Return when `doit stop` was typed for the command that holds the lock (unix ns); 0 if it wasn't."""
    with suppress(OSError):
        return (folder.path / run_folder.STOP).stat().st_mtime_ns
    return 0


def ask_to_stop(folder: RunFolder) -> None:
    """Tell a command attached to the run that its next failure is intended. Raises OSError, PacelineError."""
    refuse_links(folder.path)
    lock = RunLock(folder)
    if lock.take():  # no command is attached
        lock.release()
    else:
        (folder.path / run_folder.STOP).touch()


def record_stopped(folder: RunFolder) -> bool:
    """Write KILLED into the journal of a run that was under way without a command attached. Raises OSError. Return
    False, and write nothing, for any other run."""
    lock = RunLock(folder)
    if not lock.take():
        return False
    try:
        entries = journal.read(folder.journal)
        if not entries or entries[-1].state not in UNDER_WAY:
            return False
        detail = "stopped by doit stop, while no command was attached"
        journal.append(folder.journal, replace(entries[-1], state=State.KILLED, time=time.time(), detail=detail))
        return True
    finally:
        lock.release()


# ----------------------------------------------------------------------------------------------- waits
WAIT_FILE = "waiting.json"


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """A run that waits for a busy host. ``who``: whose run keeps it busy, in words. ``since``: unix time."""

    key: str
    host: str
    who: str
    since: float


class HostWaitRecord:
    """The file from which other commands learn that a run waits for a host. In a read-only folder it isn't written."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._since = run_dir / WAIT_FILE, time.time()

    def write(self, host: str, who: str) -> None:
        with suppress(OSError):
            wait = HostWait(key=self._path.parent.name, host=host, who=who, since=self._since)
            write_json(self._path, asdict(wait))

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def waits_under_way(runs_dir: Path) -> list[HostWait]:
    """Return the waits under way, the longest first."""
    waits = []
    for path in runs_dir.glob(f"*/{WAIT_FILE}"):
        with suppress(documents.DamagedError, OSError, TypeError):
            if locks.is_held(RunFolder(path.parent).lock):  # else its command was killed and left the file
                waits.append(HostWait(**documents.read(path)))
    return sorted(waits, key=lambda wait: wait.since)


# ------------------------------------------------------------------------------------------------------- removal
class DiskUsage(NamedTuple):
    """The size of a folder. ``bytes`` are freed by a removal; ``newest``: unix time of the last write."""

    bytes: int
    newest: float


def disk_usage(path: Path) -> DiskUsage:
    """Measure a file, or all readable files below a folder; a file with another hard link elsewhere frees nothing."""
    total, newest = 0, 0.0
    for status in _file_stats(path):
        total += status.st_size if status.st_nlink == 1 else 0
        newest = max(newest, status.st_mtime)
    return DiskUsage(bytes=total, newest=newest)


def _file_stats(path: Path) -> Iterator[os.stat_result]:
    if not path.is_dir():
        with suppress(OSError):
            yield path.lstat()
        return
    folders = [str(path)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    yield entry.stat(follow_symlinks=False)


IN_USE = "a command is at work on it"
Objection = Callable[[], str]
"""Returns why a run must not be removed after all, or ''. Called under the lock, when nobody else can write."""


def remove(folder: RunFolder, objection: Objection, *, checkpoints_alone: bool = False) -> str:
    """Remove the run folder, or only its checkpoints; return why it was kept, or ''. Raises OSError, PacelineError."""
    lock = RunLock(folder)
    if not lock.take():
        return IN_USE
    try:
        if why := objection():
            return why
        if checkpoints_alone:
            for path in checkpoint_files(folder):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            return ""
        # renamed first, so that no half of the run is left if this process is killed
        removed = folder.path.with_name(f"{temporary_prefix(f'.{folder.key}')}removed")
        folder.path.rename(removed)
        folder.lock.unlink(missing_ok=True)  # a command that waits for it makes a new lock, and finds no run
        with suppress(FileNotFoundError):  # a command on another computer may tidy up here, too
            shutil.rmtree(removed)
        return ""
    finally:
        lock.release()


def checkpoint_files(folder: RunFolder) -> Iterator[Path]:
    """Return the files that a training resumes from. Each .json comes last: without it a checkpoint is damaged."""
    for pattern in ("step-*.pt", "step-*.bad", "step-*.json"):
        yield from sorted((folder.path / run_folder.CHECKPOINTS).glob(pattern))
