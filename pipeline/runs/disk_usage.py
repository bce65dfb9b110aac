"""What a folder takes of the disk, and when something in it was written last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """``bytes`` are those that its removal frees; ``newest`` is when a file in it was last written (unix seconds)."""

    bytes: int
    newest: float


def measured(place: Path) -> Usage:
    """Of a file, or of all files below a folder. One that has another name elsewhere (a hard link) counts 0.

    What vanishes or can't be read meanwhile is left out.
    """
    total, newest = 0, 0.0
    for found in _files(place):
        total += found.st_size if found.st_nlink == 1 else 0
        newest = max(newest, found.st_mtime)
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
