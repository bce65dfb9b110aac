"""Progress of downloads and packing on stderr: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[str, int, int | None], None]
"""Called with what is being done ("download x.tar.gz"), bytes done, bytes in all (None: not known)."""

_LINE_EVERY_S = 5.0


def megabytes(count: float) -> str:
    """``12.3 MB`` (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"


@contextmanager
def reporting(on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """``on_progress`` itself where one is given, else a bar or lines on stderr."""
    if on_progress is not None:
        yield on_progress
    elif sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _Lines()


@contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


class _Lines:
    """Quiet for the first seconds, so that quick work writes nothing into a log."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = now_s
        of = f" of {megabytes(total)} ({done / total:.0%})" if total else ""
        amount = f": {megabytes(done)}{of}" if done else ""
        print(f"{what}{amount}", file=sys.stderr, flush=True)
