"""What a folder takes of the disk, and when something in it was written last."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """``bytes`` are those that its removal frees; ``newest`` is when a file in it was last written (unix seconds)."""

    bytes: int
    newest: float


def measured(folder: Path) -> Usage:
    """Of all files below ``folder``. One that has another name elsewhere (a hard link) frees nothing, so it counts 0.

    What vanishes or can't be read meanwhile is left out.
    """
    total, newest, waiting = 0, 0.0, [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_size if found.st_nlink == 1 else 0
                    newest = max(newest, found.st_mtime)
    return Usage(bytes=total, newest=newest)
