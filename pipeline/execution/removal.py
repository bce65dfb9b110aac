"""Remove a run folder, or its checkpoints, while no other command uses it. A kill midway leaves no partial run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.core.files import temporary_prefix
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock
from trainers.contract import run_folder


class Usage(NamedTuple):
    """``bytes`` are freed by the removal; ``newest`` is the time of the last write to a file in it (unix seconds)."""

    bytes: int
    newest: float


def measured(place: Path) -> Usage:
    """Measure a file, or all files below a folder. A file with another hard link elsewhere counts 0.

    Files that vanish or can't be read are left out.
    """
    total, newest = 0, 0.0
    for status in _files(place):
        total += status.st_size if status.st_nlink == 1 else 0
        newest = max(newest, status.st_mtime)
    return Usage(bytes=total, newest=newest)


def _files(place: Path) -> Iterator[os.stat_result]:
    if not place.is_dir():
        with suppress(OSError):
            yield place.lstat()
        return
    waiting = [str(place)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                with suppress(OSError):
                    yield entry.stat(follow_symlinks=False)


IN_USE = "a command is at work on it"
Objection = Callable[[], str]
"""Asked while nobody else can write into the folder: why it has to stay after all; '': nothing speaks against it."""


def remove(folder: RunFolder, objection: Objection, *, checkpoints_alone: bool = False) -> str:
    """Remove the run folder, or a finished run's checkpoints; return why it stays, or ''.

    A folder is renamed to a temporary name first. Then the run no longer exists, and if this process is killed, the
    next command removes the rest. Raises OSError, PacelineError.
    """
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
        removed = folder.path.with_name(f"{temporary_prefix(f'.{folder.key}')}removed")
        folder.path.rename(removed)
        folder.lock.unlink(missing_ok=True)  # who waits for it makes another one and finds no run
        with suppress(FileNotFoundError):  # a command on another computer may tidy up here, too
            shutil.rmtree(removed)
        return ""
    finally:
        lock.release()


def checkpoint_files(folder: RunFolder) -> Iterator[Path]:
    """Return the files that a training resumes from, without final.pt and best.pt.

    Each .json comes last: a checkpoint without its own would count as damaged.
    """
    for pattern in ("step-*.pt", "step-*.bad", "step-*.json"):
        yield from sorted((folder.path / run_folder.CHECKPOINTS).glob(pattern))
