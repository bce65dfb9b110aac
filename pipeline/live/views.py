"""The view of a run or of a sweep on a terminal's stderr, drawn with rich below the lines written there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from pipeline.live.run_view import run_view
from pipeline.live.state import RunState, SweepState
from pipeline.live.sweep_view import sweep_view


class _View(NamedTuple):
    """The view as it is whenever rich renders it: below new lines too."""

    state: Callable[[], RunState | SweepState]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield view(self.state(), time.monotonic(), *console.size)


@contextmanager
def shown(state: Callable[[], RunState | SweepState], *, colours: bool) -> Iterator[Live]:
    """Show the view of ``state()`` within the context; remove it at the end. Raises OSError: the terminal is gone.

    Without ``colours`` bold and dim are off too.
    """
    console = Console(
        file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True,
        color_system="auto" if colours else None,
    )  # fmt: skip
    live = Live(
        _View(state), console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )  # fmt: skip
    with live:
        console.show_cursor(True)  # which Ctrl-Z or kill -9 would leave a terminal without
        yield live


def print_above(live: Live, lines: Iterable[str]) -> None:
    """Write lines above the view, without sequences that would move the cursor, and redraw the view."""
    live.console.print(Text("\n").join(Text.from_ansi(line) for line in lines))


def view(state: RunState | SweepState, now: float, width: int, height: int) -> RenderableType:
    """Return the view of a run or a sweep at a time of ``time.monotonic()``, for so many columns and lines."""
    if isinstance(state, RunState):
        return run_view(state, now, width=width, height=height)
    return sweep_view(state, now, width=width, height=height)
