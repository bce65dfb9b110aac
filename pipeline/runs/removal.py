"""A run folder, or its checkpoints, removed while nobody else works on it. What is killed midway leaves no half run."""

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
    """``bytes`` are those that its removal frees; ``newest`` is when a file in it was last written (unix seconds)."""

    bytes: int
    newest: float


def measured(place: Path) -> Usage:
    """Of a file, or of all files below a folder. One that has another name elsewhere (a hard link) counts 0.

    What vanishes or can't be read meanwhile is left out.
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


def remove_run(folder: RunFolder, objection: Objection) -> str:
    """Remove the folder; why it stays, or ''. Raises OSError, PacelineError.

    It gets the name of a temporary file first: from then on there is no such run, and if this process is killed, the
    next command removes what is left.
    """
    return _alone(folder, objection, _remove_folder)


def remove_checkpoints(folder: RunFolder, objection: Objection) -> str:
    """Remove what a training goes on from, of a run that is finished; why it stays, or ''. Raises as ``remove_run``."""
    return _alone(folder, objection, _remove_checkpoints)


def checkpoint_files(folder: RunFolder) -> Iterator[Path]:
    """What a training goes on from: files and folders of shards. final.pt and best.pt are none of them.

    A .json comes last: a checkpoint without its own would be taken for a damaged one.
    """
    for pattern in ("step-*.pt", "shards-*", "step-*.bad", "step-*.json"):
        yield from sorted((folder.path / run_folder.CHECKPOINTS).glob(pattern))


def _alone(folder: RunFolder, objection: Objection, remove: Callable[[RunFolder], None]) -> str:
    lock = RunLock(folder)
    if not lock.take():
        return IN_USE
    try:
        why = objection()
        if not why:
            remove(folder)
        return why
    finally:
        lock.release()


def _remove_folder(folder: RunFolder) -> None:
    removed = folder.path.with_name(f"{temporary_prefix(f'.{folder.key}')}removed")
    folder.path.rename(removed)
    folder.lock.unlink(missing_ok=True)  # who waits for it makes another one and finds no run
    with suppress(FileNotFoundError):  # a command on another computer may tidy up here, too
        shutil.rmtree(removed)


def _remove_checkpoints(folder: RunFolder) -> None:
    for path in checkpoint_files(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
