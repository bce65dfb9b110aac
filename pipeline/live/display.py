"""Draw a view on a terminal's stderr below the lines written there, with rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

Drawn = Callable[[float, int, int], RenderableType]
"""Gives the view at a time of ``time.monotonic()``, for so many columns and lines."""


class Display:
    """Show the view within the context; remove it at the end. Raises OSError: the terminal is gone."""

    def __init__(self, drawn: Drawn, color_system: Literal["auto"] | None) -> None:
        self._console = Console(
            file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, color_system=color_system
        )
        self._live = Live(
            _View(drawn), console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._console.show_cursor(True)  # which Ctrl-Z or kill -9 would leave a terminal without
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    @property
    def width(self) -> int:
        """The current width in columns."""
        return self._console.width

    def print(self, lines: Iterable[str]) -> None:
        """Write lines above the view, without sequences that would move the cursor, and redraw the view."""
        self._console.print(Text("\n").join(Text.from_ansi(line) for line in lines))

    def refresh(self) -> None:
        """Redraw the view."""
        self._live.refresh()


class _View:
    """The current view, for rich's live display."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size = console.size
        yield self._drawn(time.monotonic(), size.width, size.height)
