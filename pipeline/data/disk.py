"""A disk that is full or read-only, said clearly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files import FULL
from pipeline.data.progress import megabytes

_MARGIN_BYTES = 1 << 18  # manifest, folders and the file system's own needs


def _full(path: Path, needed_bytes: int, free_bytes: int) -> DataError:
    return DataError(
        f"no room in {path}: {needed_bytes} bytes ({megabytes(needed_bytes)}) needed, {free_bytes} free",
        hint="free some space, or paths.data=<a folder on a larger disk>",
    )


def require(path: Path, needed_bytes: int) -> None:
    """Refuse before anything is written. Raises DataError."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes + _MARGIN_BYTES:
        raise _full(path, needed_bytes + _MARGIN_BYTES, free_bytes)


@contextmanager
def room(path: Path, needed_bytes: int) -> Iterator[None]:
    """``require``, and the same error when others fill the disk meanwhile."""
    require(path, needed_bytes)
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _full(path, needed_bytes, shutil.disk_usage(path).free) from error
