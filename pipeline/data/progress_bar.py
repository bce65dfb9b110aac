"""A progress bar on a terminal's stderr, drawn by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from pipeline.core.printable import takes_colours

_NARROW = 80  # columns


@contextmanager
def bar(first: str, amount: Callable[[int, int | None], str]) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar while the block runs; it disappears at the end.

    ``first`` is the description until the first report; ``amount`` formats bytes done and total bytes. A narrow
    terminal gets only the text, because a line that wraps can't be redrawn.
    """
    colours: Literal["auto"] | None = "auto" if takes_colours(sys.stderr, os.environ) else None
    console = Console(stderr=True, color_system=colours)
    words = TextColumn("{task.description}{task.fields[amount]}", table_column=Column(no_wrap=True))
    columns = (words,) if console.width < _NARROW else (words, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        tasks = {first: shown.add_task(first, total=None, amount="")}

        def report(what: str, done: int, total: int | None) -> None:
            if first in tasks:
                shown.remove_task(tasks.pop(first))
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total, amount="")
            shown.update(tasks[what], completed=done, total=total, amount=amount(done, total))

        yield report
