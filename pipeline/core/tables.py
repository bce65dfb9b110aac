"""Format text for people: tables, wrapped lines, counts, sizes and durations.

Widths are columns of a terminal: a Chinese character has two of them.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.core.printable import without_colours

ENDLESS = 100_000
"""The width of output that isn't a terminal: nothing wraps."""
_UNITS = {
    r"(^|_)bytes$": ((1e12, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB")),
    r"(?<!_per)_s$|(^|_)seconds$": ((7200.0, 3600.0, "h"), (120.0, 60.0, "min")),
}
"""Pattern for the end of a metric's name → its units, largest first: smallest value shown in it, factor, name."""
_LARGE, _HUGE = 1e5, 1e15  # a figure between these two is shown as a whole number
_FILLER = "\0"  # stands for the second column of a wide character while textwrap counts


def columns(text: str) -> int:
    """Return the width in terminal columns: two for a Chinese character, none for a combining accent."""
    if text.isascii():
        return len(text)
    width: int = _cells().cell_len(text)
    return width


def padded(text: str, width: int) -> str:
    """Pad with spaces to ``width`` columns."""
    return text + " " * (width - columns(text))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns, two spaces apart. ``rows`` holds at least one row; all have the same length."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def cut(text: str, width: int) -> str:
    """Truncate to ``width`` columns, with an ellipsis."""
    if columns(text) <= width:
        return text
    return f"{_cells().set_cell_size(text, max(0, width - 1)).rstrip()}…"


def _cells() -> Any:
    from rich import cells  # late, because many commands print only ASCII

    return cells


def in_width(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lay out a table, whose first row is the header, in lines of at most ``width`` terminal columns.

    Columns that don't fit follow in a table below, with the first column again. If not even two fit, rows are blocks.
    """
    all_columns = [*zip(*rows, strict=True)]
    widths = [max(map(columns, column)) for column in all_columns]
    if widths[0] + 2 + max(widths[1:]) > width:
        return [*_blocks(rows, width)]
    lines: list[str] = []
    start = 1
    while start < len(all_columns):
        # the first column and as many of the remaining ones as fit; two spaces stand between columns
        end, used = start + 1, widths[0] + 2 + widths[start]
        while end < len(all_columns) and used + 2 + widths[end] <= width:
            used += 2 + widths[end]
            end += 1
        fitting = zip(all_columns[0], *all_columns[start:end], strict=True)
        lines += ([""] if lines else []) + aligned([*fitting]).splitlines()
        start = end
    return lines


def _blocks(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield for each row its first cell, and below it a line ``name  value`` for each further cell."""
    for row in rows[1:]:
        yield from wrapped(row[0], width)
        for line in aligned([("", name, value) for name, value in zip(rows[0][1:], row[1:], strict=True)]).splitlines():
            yield from wrapped(line, width)


def folded(text: str, width: int) -> str:
    """Wrap each line."""
    return "\n".join(part for line in text.split("\n") for part in wrapped(line, width))


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to ``width`` columns, without its colours. Long words (paths, keys) stay whole for copying."""
    if columns(without_colours(line)) <= width:
        return [line]
    line = without_colours(line)
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        _filled(line.strip()), width, initial_indent=indent, subsequent_indent=f"{indent}    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [part.replace(_FILLER, "") for part in lines] or [line]


def _filled(text: str) -> str:
    """Pad wide characters so that the text has as many characters as columns."""
    return text if text.isascii() else "".join(char + _FILLER * (columns(char) - 1) for char in text)


def is_count(word: str) -> bool:
    """Return True for a whole number from 1."""
    return word.isascii() and word.isdecimal() and int(word) > 0


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return ``a, b and 3 more``: at most ``most`` names of a list."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def fenced(lines: Sequence[str], language: str = "") -> list[str]:
    """Return a fenced code block of Markdown with the lines, whatever they contain."""
    ticks = (len(row) for line in lines for row in re.findall("`+", line))
    fence = "`" * max(3, 1 + max(ticks, default=0))
    return [f"{fence}{language}", *lines, fence]


def file_size(count_bytes: int) -> str:
    """Return ``950 B``, ``1.3 MB``, ``21.0 GB``; 1 kB is 1000 B."""
    if count_bytes < 1000:
        return f"{count_bytes} B"
    amount = float(count_bytes)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if amount < 999.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} TB"


def duration(seconds: float) -> str:
    """Return ``1.5 s``, ``2 min 05 s``, ``3 h 12 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def unit_of(name: str, size: float) -> tuple[float, str]:
    """Return (factor, name) of the unit in which a metric of this size is short to write; (1.0, "") if none fits.

    A metric's name that ends in ``bytes`` means a size, one in ``_s`` or ``seconds`` a duration, except ``_per_s``.
    """
    last = name.lower().rpartition("/")[2]
    units = next((units for ending, units in _UNITS.items() if re.search(ending, last)), ())
    return next(((scale, unit) for smallest, scale, unit in units if abs(size) >= smallest), (1.0, ""))


def quantity(name: str, value: float, form: str = ".6g") -> str:
    """Return a metric in its unit (``8.1 MB``, ``2 min 05 s``), or formatted with ``form``."""
    unit = unit_of(name, value)[1]
    if unit and math.isfinite(value):
        return file_size(round(value)) if unit in ("kB", "MB", "GB", "TB") else duration(value)
    text = f"{value:{form}}"
    # six digits would round a large count, or write it as 1.23457e+06
    is_large = abs(value) < _HUGE and (abs(value) >= _LARGE or "e+" in text)
    return f"{value:,.0f}" if is_large else text
