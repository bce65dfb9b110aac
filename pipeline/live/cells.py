"""What the views of a run and of a sweep are drawn of: text without control characters, bars, sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pipeline.core.printable import printable
from pipeline.core.tables import file_size

Part = tuple[str, str]
"""A piece of a line and its style ('' for none)."""

_FULL, _EMPTY = "━", "─"
_NAMES = {"val/accuracy": "val accuracy", "test/accuracy": "test accuracy"}


def fitted(text: str, width: int) -> str:
    """Exactly so many columns, cut with an ellipsis where it is longer."""
    text = printable(text)
    if cell_len(text) > width:
        return set_cell_size(text, max(0, width - 1)) + "…"
    return set_cell_size(text, width)


def line(parts: Iterable[Part], width: int) -> Text:
    """One line that doesn't wrap. Nothing in it is taken for rich's markup."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for piece, style in parts:
        text.append(printable(piece), style)
    text.truncate(width, overflow="ellipsis")
    return text


def bar(done: float, width: int) -> list[Part]:
    """``done`` from 0 to 1."""
    full = round(done * width)
    return [(_FULL * full, "green"), (_EMPTY * (width - full), "dim")]


def percent(part: float) -> str:
    return f"{part:.0%}"


def speed(per_s: float) -> str:
    """``1.2 MB/s``."""
    return f"{file_size(round(per_s))}/s"


def time_left(seconds: float) -> str:
    """``about 25 min left``: as exact as anybody can know it."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02d} min left"


def figure(name: str, value: float) -> str:
    """``val accuracy 0.9889``, ``loss nan``, ``loss 3.37e-05``."""
    short = abs(value) >= 1000 or 0 < abs(value) < 1e-3
    return f"{_NAMES.get(name, name)} {value:{'.4g' if short else '.4f'}}"
