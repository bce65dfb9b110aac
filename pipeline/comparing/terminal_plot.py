"""Curves in a terminal, drawn in braille characters: two dots across and four up in each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.comparing import scales
from pipeline.comparing.curves import Band, thinned
from pipeline.comparing.scales import Scale
from pipeline.core.printable import printable
from pipeline.core.tables import wrapped

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
_COLOURS = (34, 33, 32, 35, 36, 31)  # ANSI: blue, yellow, green, magenta, cyan, red
_LEAST_WIDTH = 30
_MARGIN = 9  # characters left of the axis; more where its values have more
_TICKS = 4


def plot(
    bands: Sequence[Band], *, metric: str, axis: str, width: int, height: int, log: bool = False, colour: bool = False
) -> str:
    """The curves, their ends of one standard deviation as sparse dots, and below a line for each.

    Args:
        width, height: of the whole, in characters.
        colour: whether curves may be told apart by ANSI colours; a letter at their ends tells them apart too.
    """
    points = [point for band in bands for point in band.points]
    across = scales.around(point.x for point in points)
    up = scales.around((value for point in points for value in (point.mean, *point.ends)), log=log)
    if across is None or up is None:
        return f"{printable(metric)}: nothing to draw" + (" above 0, as a logarithmic axis needs" if log else "")
    margin = max([_MARGIN, *(len(scales.text(value)) for value in up.ticks(_TICKS))])
    canvas = _Canvas(max(_LEAST_WIDTH, width) - margin - 2, max(4, height - 4 - len(bands)))
    for number, band in enumerate(bands):
        canvas.draw(band, number, across, up)
    lines = [f"{printable(metric)}{', logarithmic' if log else ''}", *_framed(canvas, up, margin, colour=colour)]
    lines.append(f"{'':>{margin}} └{'─' * canvas.columns}")
    left, right = scales.end(across.low), f"{scales.end(across.high)} {axis}"
    lines.append(f"{'':>{margin}}  {left}{right:>{canvas.columns - len(left)}}")
    legends = [line for number, band in enumerate(bands) for line in legend(band, number, width, colour=colour)]
    return "\n".join([*lines, *legends])


def legend(band: Band, number: int, width: int, *, colour: bool) -> list[str]:
    """``A  optimizer.lr=0.1  n 3, last 0.9830 ± 0.0042``, and how many values are no number."""
    from pipeline.comparing.tables import with_spread

    gaps = f", {band.gaps} values are no number: gaps" if band.gaps else ""
    gaps += f", {band.below} points at or below 0 aren't drawn" if band.below else ""
    last = band.points[-1] if band.points else None
    of_fewer = f" (n {last.n})" if last is not None and last.n < band.n else ""
    said = "no points" if last is None else f"last {with_spread(last.mean, last.std)}{of_fewer}"
    count = f"n {band.n}{f' ({band.unfinished})' if band.unfinished else ''}"
    first, *others = wrapped(f"{band.label}  {band.title}  {count}, {said}{gaps}{band.about_passes}", width)
    return [_painted(band.label, number, colour=colour) + first.removeprefix(band.label), *others]


def _painted(text: str, number: int, *, colour: bool) -> str:
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m" if colour else text


def _framed(canvas: _Canvas, up: Scale, margin: int, *, colour: bool) -> Iterator[str]:
    """The rows of the canvas with the values of the axis beside them."""
    marks = {round((1 - up.share(value)) * (canvas.rows - 1)): scales.text(value) for value in up.ticks(_TICKS)}
    for row in range(canvas.rows):
        cells = [_painted(mark, owner, colour=colour) if mark != " " else mark for mark, owner in canvas.row(row)]
        yield f"{marks.get(row, ''):>{margin}} {'┤' if row in marks else '│'}{''.join(cells)}".rstrip()


class _Canvas:
    """Characters of 2 × 4 dots, each with the number of the curve that was drawn there last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots: dict[tuple[int, int], int] = {}
        self._owner: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int], str] = {}

    def draw(self, band: Band, number: int, across: Scale, up: Scale) -> None:
        """Its mean as a line, the ends of its spread as single dots, its label at the end."""
        for part in band.parts:
            points = thinned(part, 2 * self.columns)
            places = [self._place(point.x, point.mean, across, up) for point in points]
            for point in points:
                for value in point.ends if point.std else ():
                    self._dot(*self._place(point.x, value, across, up), number)
            for start, end in zip(places, places[1:] or places, strict=False):
                self._line(start, end, number)
            if places:
                x, y = places[-1]
                self._letters[x // 2, y // 4] = band.label[-1]
                self._owner[x // 2, y // 4] = number

    def row(self, row: int) -> list[tuple[str, int]]:
        """Each character of a row and whose it is."""
        cells = [(column, row) for column in range(self.columns)]
        return [(self._character(cell), self._owner.get(cell, 0)) for cell in cells]

    def _character(self, cell: tuple[int, int]) -> str:
        dots = self._dots.get(cell, 0)
        return self._letters.get(cell) or (chr(0x2800 + dots) if dots else " ")

    def _place(self, x: float, y: float, across: Scale, up: Scale) -> tuple[int, int]:
        return (
            round(across.share(x) * (2 * self.columns - 1)),
            round((1 - up.share(y)) * (4 * self.rows - 1)),
        )

    def _line(self, start: tuple[int, int], end: tuple[int, int], number: int) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for at in range(steps + 1):
            x = round(start[0] + (end[0] - start[0]) * at / steps)
            y = round(start[1] + (end[1] - start[1]) * at / steps)
            self._dot(x, y, number)

    def _dot(self, x: int, y: int, number: int) -> None:
        cell = (x // 2, y // 4)
        self._dots[cell] = self._dots.get(cell, 0) | _DOTS[y % 4][x % 2]
        self._owner[cell] = number
