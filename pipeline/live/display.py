"""Draw a view on a terminal's stderr below the lines written there, with rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

Drawn = Callable[[float, int, int], RenderableType]
"""Gives the view at a time of ``time.monotonic()``, for so many columns and lines."""


class _View(NamedTuple):
    """The view as it is whenever rich renders it: below new lines too."""

    drawn: Drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.drawn(time.monotonic(), *console.size)


@contextmanager
def shown(drawn: Drawn, *, colours: bool) -> Iterator[Live]:
    """Show the view within the context; remove it at the end. Raises OSError: the terminal is gone.

    Without ``colours`` bold and dim are off too.
    """
    console = Console(
        file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True,
        color_system="auto" if colours else None,
    )  # fmt: skip
    live = Live(
        _View(drawn), console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )  # fmt: skip
    with live:
        console.show_cursor(True)  # which Ctrl-Z or kill -9 would leave a terminal without
        yield live


def print_above(live: Live, lines: Iterable[str]) -> None:
    """Write lines above the view, without sequences that would move the cursor, and redraw the view."""
    live.console.print(Text("\n").join(Text.from_ansi(line) for line in lines))
