"""Progress of downloads and packing on stderr: a bar on a terminal, else a line every five seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.core.processes.heartbeat import Heartbeat

OnProgress = Callable[[str, int, int | None], None]
"""Called with the current step ("downloading x.tar.gz"), bytes done, and total bytes (None: unknown)."""

_FIRST = "preparing the data"


def megabytes(count: float) -> str:
    """Return ``12.3 MB`` (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"


@contextmanager
def reporting(on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield ``on_progress`` if given, else a function that shows a bar or lines on stderr."""
    if on_progress is not None:
        yield on_progress
    elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):  # rich draws no bars there
        from pipeline.data.progress_bar import bar  # late import: only a terminal needs rich

        with bar(_FIRST, _amount) as report:
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

    with Heartbeat(lambda text: print(text, file=sys.stderr, flush=True)) as heartbeat:
        heartbeat.doing(lambda: state)
        yield report


def _amount(done: int, total: int | None) -> str:
    """Return ``: 6.0 MB of 20.0 MB (30%)``, as far as known."""
    of = f" of {megabytes(total)} ({done / total:.0%})" if total else ""
    return f": {megabytes(done)}{of}" if done else ""
