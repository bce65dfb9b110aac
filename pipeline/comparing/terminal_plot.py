"""Plot curves in a terminal as areas of block characters on a common scale. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.comparing.charts import span_of, within
from pipeline.comparing.curves import Band
from pipeline.comparing.tables import with_spread
from pipeline.core.printable import printable
from pipeline.core.tables import wrapped

_BLOCKS = " ▁▂▃▄▅▆▇█"
_SPREAD = "░"
NOTE = f"{_SPREAD} one standard deviation over seeds above the mean"
_COLOURS = (34, 33, 32, 35, 36, 31)  # ANSI: blue, yellow, green, magenta, cyan, red
_LEAST_WIDTH, _MOST_ROWS = 30, 8
Span = tuple[float, float]


def plot(
    bands: Sequence[Band], *, metric: str, axis: str, width: int, height: int, log: bool = False, colour: bool = False
) -> str:
    """Return the curves, each with one standard deviation as a shade above the mean, and a line about it below.

    ``width`` and ``height`` are those of the whole plot, in characters; ``colour`` allows ANSI colours.
    """
    points = [point for band in bands for point in band.points]
    up = span_of((value for point in points for value in (point.mean, *point.ends)), log=log)
    if up is None:
        return f"{printable(metric)}: nothing to draw" + (" above 0, as a logarithmic axis needs" if log else "")
    across = min(point.x for point in points), max(point.x for point in points)
    rows = min(_MOST_ROWS, max(1, (height - 1) // len(bands) - 1))
    head = f"{printable(metric)} {_ends(up)}{', logarithmic' if log else ''}, over {axis} {_ends(across)}"
    lines = wrapped(head, width)
    for number, band in enumerate(bands):
        paint = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{{}}\x1b[0m" if colour else "{}"
        lines += [paint.format(row) for row in _area(band, across, up, max(_LEAST_WIDTH, width), rows, log=log)]
        first, *others = _about(band, width)
        lines += [paint.format(band.label) + first.removeprefix(band.label), *others]
    return "\n".join(lines)


def _about(band: Band, width: int) -> list[str]:
    """Return ``A  optimizer.lr=0.1  n 3, last 0.9830 ± 0.0042``, and the number of non-finite values."""
    gaps = f", {band.gaps} values are no number: gaps" if band.gaps else ""
    gaps += f", {band.below} points at or below 0 aren't drawn" if band.below else ""
    last = band.points[-1] if band.points else None
    of_fewer = f" (n {last.n})" if last is not None and last.n < band.n else ""
    said = "no points" if last is None else f"last {with_spread(last.mean, last.std)}{of_fewer}"
    count = f"n {band.n}{f' ({band.unfinished})' if band.unfinished else ''}"
    return wrapped(f"{band.label}  {band.title}  {count}, {said}{gaps}{band.about_passes}", width)


def _area(band: Band, across: Span, up: Span, columns: int, rows: int, *, log: bool) -> list[str]:
    """Return the rows from top to bottom.

    A point extends to the next one of its piece; gaps between pieces stay empty.
    """
    cells: list[Span] = [(0, 0)] * columns  # mean and upper end, in eighths of a row
    for part in band.parts:
        starts = [round(_share(point.x, across) * (columns - 1)) for point in part]
        for point, start, end in zip(part, starts, [*starts[1:], starts[-1]], strict=True):
            mean, top = (1 + _share(value, up, log=log) * (8 * rows - 1) for value in (point.mean, point.ends[1]))
            cells[start : max(end, start + 1)] = [(mean, top)] * max(1, end - start)
    return ["".join(_block(cell, 8 * row) for cell in cells).rstrip() for row in reversed(range(rows))]


def _block(cell: Span, floor: int) -> str:
    filled = min(8, max(0, round(cell[0]) - floor))
    return _BLOCKS[filled] if filled else _SPREAD if cell[1] >= floor + 4 else " "


def _share(value: float, span: Span, *, log: bool = False) -> float:
    """Return the relative position of a value: 0 at the low end, 1 at the high end."""
    low, value, high = (math.log10(one) if log else one for one in (span[0], within(span, value), span[1]))
    return (value - low) / (high - low) if high > low else 0.5


def _ends(span: Span) -> str:
    return " to ".join(f"{end:,.10g}" if float(end).is_integer() else f"{end:.3g}" for end in span)
