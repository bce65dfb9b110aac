"""Progress of downloads and packing, as lines on stderr; and checks of the free disk space for them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files import FULL
from pipeline.core.processes.threads import WaitReports

OnProgress = Callable[[str, int, int | None], None]
"""Called with the current step ("downloading x.tar.gz"), bytes done, and total bytes (None: unknown)."""

_FIRST = "preparing the data"
_MARGIN_BYTES = 1 << 18  # for manifest, folders and file system overhead


def megabytes(count: float) -> str:
    """Return ``12.3 MB`` (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"


@contextmanager
def reporting(on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield ``on_progress`` if given, else a function whose latest report is printed to stderr from time to time.

    The first line comes after five seconds. It is repeated while a step makes no reports (hashing a large file).
    """
    if on_progress is not None:
        yield on_progress
        return
    state = _FIRST

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal state
        state = what + _amount(done, total)

    with WaitReports(lambda text: print(text, file=sys.stderr, flush=True)) as reports:
        reports.doing(lambda: state)
        yield report


def _amount(done: int, total: int | None) -> str:
    of = f" of {megabytes(total)} ({done / total:.0%})" if total else ""
    return f": {megabytes(done)}{of}" if done else ""


# ------------------------------------------------------------------------------ disk space
def _no_room_error(path: Path, needed_bytes: int, free_bytes: int) -> DataError:
    return DataError(
        f"no room in {path}: {needed_bytes} bytes ({megabytes(needed_bytes)}) needed, {free_bytes} free",
        hint="free some space, or paths.data=<a folder on a larger disk>",
    )


def require_room(path: Path, needed_bytes: int) -> None:
    """Check the free space before writing. Raises DataError."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes + _MARGIN_BYTES:
        raise _no_room_error(path, needed_bytes + _MARGIN_BYTES, free_bytes)


@contextmanager
def room(path: Path, needed_bytes: int) -> Iterator[None]:
    """Check the free space like ``require_room``, and raise the same error if the disk fills up inside the block."""
    require_room(path, needed_bytes)
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _no_room_error(path, needed_bytes, shutil.disk_usage(path).free) from error
