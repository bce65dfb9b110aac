"""Check free disk space, and report a full disk clearly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files import FULL
from pipeline.data.progress import megabytes

_MARGIN_BYTES = 1 << 18  # for manifest, folders and file system overhead


def _full(path: Path, needed_bytes: int, free_bytes: int) -> DataError:
    return DataError(
        f"no room in {path}: {needed_bytes} bytes ({megabytes(needed_bytes)}) needed, {free_bytes} free",
        hint="free some space, or paths.data=<a folder on a larger disk>",
    )


def require(path: Path, needed_bytes: int) -> None:
    """Check the free space before writing. Raises DataError."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes + _MARGIN_BYTES:
        raise _full(path, needed_bytes + _MARGIN_BYTES, free_bytes)


@contextmanager
def room(path: Path, needed_bytes: int) -> Iterator[None]:
    """Check the free space like ``require``, and raise the same error if the disk fills up inside the block."""
    require(path, needed_bytes)
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _full(path, needed_bytes, shutil.disk_usage(path).free) from error
