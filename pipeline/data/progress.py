"""Progress of downloads and packing on stderr (a bar on a terminal, else a line every five seconds), and disk space."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pipeline.core.errors import DataError
from pipeline.core.files import FULL
from pipeline.core.printable import takes_colours
from pipeline.core.processes.threads import WaitReports

OnProgress = Callable[[str, int, int | None], None]
"""Called with the current step ("downloading x.tar.gz"), bytes done, and total bytes (None: unknown)."""

_FIRST = "preparing the data"
_NARROW = 80  # columns
_MARGIN_BYTES = 1 << 18  # for manifest, folders and file system overhead


def megabytes(count: float) -> str:
    """Return ``12.3 MB`` (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"


@contextmanager
def reporting(on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield ``on_progress`` if given, else a function that shows a bar or lines on stderr."""
    if on_progress is not None:
        yield on_progress
    elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):  # rich draws no bars there
        with _bar() as report:
            yield report
    else:
        with _lines() as report:
            yield report


@contextmanager
def _lines() -> Iterator[OnProgress]:
    """Print lines at intervals, also during steps without reports (hashing a large file); quick work prints nothing."""
    state = _FIRST

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal state
        state = what + _amount(done, total)

    with WaitReports(lambda text: print(text, file=sys.stderr, flush=True)) as reports:
        reports.doing(lambda: state)
        yield report


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """Show a bar, drawn by rich, that disappears at the end.

    A narrow terminal gets only the text, because a line that wraps can't be redrawn.
    """
    from rich import console, progress, table  # takes 0.1 s to load, and only a terminal shows a bar

    colours: Literal["auto"] | None = "auto" if takes_colours(sys.stderr, os.environ) else None
    screen = console.Console(stderr=True, color_system=colours)
    column = table.Column(no_wrap=True)
    words = progress.TextColumn("{task.description}{task.fields[amount]}", table_column=column)
    bar = () if screen.width < _NARROW else (progress.BarColumn(), progress.TimeRemainingColumn())
    with progress.Progress(words, *bar, console=screen, transient=True) as shown:
        tasks = {_FIRST: shown.add_task(_FIRST, total=None, amount="")}

        def report(what: str, done: int, total: int | None) -> None:
            if _FIRST in tasks:
                shown.remove_task(tasks.pop(_FIRST))
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total, amount="")
            shown.update(tasks[what], completed=done, total=total, amount=_amount(done, total))

        yield report


def _amount(done: int, total: int | None) -> str:
    """Return ``: 6.0 MB of 20.0 MB (30%)``, as far as known."""
    of = f" of {megabytes(total)} ({done / total:.0%})" if total else ""
    return f": {megabytes(done)}{of}" if done else ""


# ------------------------------------------------------------------------------ disk space
def _full(path: Path, needed_bytes: int, free_bytes: int) -> DataError:
    return DataError(
        f"no room in {path}: {needed_bytes} bytes ({megabytes(needed_bytes)}) needed, {free_bytes} free",
        hint="free some space, or paths.data=<a folder on a larger disk>",
    )


def require_room(path: Path, needed_bytes: int) -> None:
    """Check the free space before writing. Raises DataError."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes + _MARGIN_BYTES:
        raise _full(path, needed_bytes + _MARGIN_BYTES, free_bytes)


@contextmanager
def room(path: Path, needed_bytes: int) -> Iterator[None]:
    """Check the free space like ``require_room``, and raise the same error if the disk fills up inside the block."""
    require_room(path, needed_bytes)
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _full(path, needed_bytes, shutil.disk_usage(path).free) from error
