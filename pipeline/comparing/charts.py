"""Charts as SVG elements for a page, whose style sheet gives them their colours. Pure; every name is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pipeline.comparing import scales
from pipeline.comparing.curves import Band, of_several, thinned
from pipeline.comparing.scales import Scale
from pipeline.core.tables import counted

COLOURS = 8
"""Curves beyond these are grey: more colours nobody tells apart."""
_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 40
_BOX, _PITCH, _BOX_CHARS = 190, 214, 26  # of a graph: a box's width, that of a column, the characters it has room for
_NAME_CHAR = 6.8  # the width of a character, about
_FEW = 150  # points of a curve
_MANY = 60  # where there are more curves than colours


@dataclass(frozen=True, kw_only=True)
class Node:
    """A box of a graph: up to two lines, ``state`` is done, todo, failed or ''; ``needs`` are names of others."""

    name: str
    lines: tuple[str, ...]
    state: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A trial of parallel coordinates: its title and its value on each axis (None: it has none there)."""

    title: str
    values: tuple[float | str | None, ...]


# ---------------------------------------------------------------------------------------------- curves
def curves(bands: Sequence[Band], *, title: str, axis: str, log: bool = False, colours: Mapping[str, int]) -> str:
    """Curves with a band of one standard deviation on either side.

    Args:
        colours: of a band's label its colour, 0 to COLOURS - 1; the others are grey.
    """
    points = [point for band in bands for point in band.points]
    across = scales.around(point.x for point in points)
    up = scales.around((value for point in points for value in (point.mean, *point.ends)), log=log)
    if across is None or up is None:
        return ""
    most = _FEW if len(bands) <= COLOURS else _MANY
    drawn = sorted(bands, key=lambda band: band.label in colours)  # grey ones lie below
    parts = [*_frame(across, up, axis)]
    for band in drawn:
        parts += _band(band, across, up, _class(band.label, colours), most)
    ends = [f"{band.label} ends at {band.points[-1].mean:.4g}" for band in bands if band.points]
    said = f"{title} over {axis}: {counted(len(ends), 'curve')}; {', '.join(ends[:COLOURS])}"
    return _svg(_WIDTH, _HEIGHT, said, parts)


def _class(label: str, colours: Mapping[str, int]) -> str:
    return f"c{colours[label]}" if label in colours else "rest"


def _frame(across: Scale, up: Scale, axis: str) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in up.ticks():
        y = _y(value, up)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" dy="0.32em">{escape(scales.text(value))}</text>'
    for value in across.ticks(6):
        at = f'x="{_x(value, across)}" y="{bottom + 16}"'
        yield f'<text {at} text-anchor="middle">{escape(scales.text(value))}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{escape(axis)}</text>'


def _band(band: Band, across: Scale, up: Scale, colour: str, most: int) -> Iterator[str]:
    """Its pieces, and one element with what a pointer over them tells."""
    said = f"{band.label} {band.title} (n {band.count}{f', {band.gaps} values are no number' if band.gaps else ''})"
    yield f'<g class="{colour}"><title>{escape(said)}</title>'
    for part in band.parts:
        points = thinned(part, most)
        for spread in [] if colour == "rest" else of_several(points):
            above = [f"{_x(point.x, across)},{_y(point.ends[1], up)}" for point in spread]
            below = [f"{_x(point.x, across)},{_y(point.ends[0], up)}" for point in reversed(spread)]
            yield f'<polygon class="band" points="{" ".join([*above, *below])}"/>'
        middle = " ".join(f"{_x(point.x, across)},{_y(point.mean, up)}" for point in points)
        yield f'<polyline points="{middle}"/>'
        if len(points) == 1:
            yield f'<circle cx="{_x(points[0].x, across)}" cy="{_y(points[0].mean, up)}" r="2.5"/>'
    yield "</g>"


def _x(value: float, scale: Scale) -> str:
    return _short(_LEFT + scale.share(value) * (_WIDTH - _LEFT - _RIGHT))


def _y(value: float, scale: Scale) -> str:
    return _short(_HEIGHT - _BOTTOM - scale.share(value) * (_HEIGHT - _TOP - _BOTTOM))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(width: float, height: float, said: str, parts: Sequence[str], size: str = "") -> str:
    """``size``: its attributes where it isn't as wide as there is room."""
    label = escape(said)
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}"{size}>{"".join(parts)}</svg>'


# -------------------------------------------------------------------------------- parallel coordinates
def parallel(axes: Sequence[str], lines: Sequence[Line], *, less_is_better: bool = False) -> str:
    """A line a trial across all axes; the last axis is the metric, by which lines are coloured from good to bad."""
    ends = [_axis([line.values[at] for line in lines]) for at in range(len(axes))]
    places = [_LEFT + at * (_WIDTH - 2 * _LEFT) / max(1, len(axes) - 1) for at in range(len(axes))]
    ranked = [_share(line.values[-1], ends[-1]) for line in lines]
    parts = []
    for line, rank in sorted(zip(lines, ranked, strict=True), key=lambda item: -1 if item[1] is None else item[1]):
        at = [(x, _share(value, end)) for x, value, end in zip(places, line.values, ends, strict=True)]
        points = " ".join(f"{_short(x)},{_level(share)}" for x, share in at if share is not None)
        quality = None if rank is None else (1 - rank if less_is_better else rank)
        colour = "rest" if quality is None else f"q{min(4, int(quality * 5))}"
        parts.append(f'<g class="{colour}"><title>{escape(line.title)}</title><polyline points="{points}"/></g>')
    for name, x, end in zip(axes, places, ends, strict=True):
        parts += _upright(name, x, end, int(_WIDTH / len(axes) / _NAME_CHAR))
    return _svg(_WIDTH, _HEIGHT, f"parallel coordinates of {len(lines)} trials: {', '.join(axes)}", parts)


def _axis(values: Sequence[float | str | None]) -> Scale | dict[str, float] | None:
    """Of numbers a scale (logarithmic where they span a power of ten), of anything else evenly spaced names."""
    told = [value for value in values if value is not None]
    numbers = [value for value in told if isinstance(value, int | float) and math.isfinite(value)]
    if len(numbers) == len(told) and numbers:
        return scales.around(numbers, log=min(numbers) > 0 and max(numbers) / min(numbers) >= 9.99)
    return scales.positions(sorted(map(_name, told))) if told else None


def _name(value: float | str) -> str:
    """Of a number among names (``auto``, ``2``)."""
    return value if isinstance(value, str) else scales.text(value)


def _share(value: float | str | None, end: Scale | dict[str, float] | None) -> float | None:
    if value is None or end is None:
        return None
    if isinstance(end, dict):
        return end[_name(value)]
    return end.share(float(value))


def _level(share: float) -> str:
    return _short(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - 20 - _BOTTOM))


def _upright(name: str, x: float, end: Scale | dict[str, float] | None, room: int) -> Iterator[str]:
    """``room``: for how many characters of its name, of which the last ones tell most."""
    yield f'<line class="axis" x1="{_short(x)}" x2="{_short(x)}" y1="{_level(0)}" y2="{_level(1)}"/>'
    shown = name if len(name) <= room else f"…{name[1 - room :]}"
    yield f'<text x="{_short(x)}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(shown)}</text>'
    if isinstance(end, dict):
        marks = [(key if len(key) <= 14 else f"{key[:13]}…", share) for key, share in [*end.items()][:12]]
    else:
        marks = [] if end is None else [(scales.text(value), end.share(value)) for value in end.ticks(4)]
    for mark, share in marks:
        yield f'<text x="{_short(x + 5)}" y="{_level(share)}" dy="0.32em">{escape(mark)}</text>'


# ----------------------------------------------------------------------------------------------- graph
def graph(nodes: Sequence[Node]) -> str:
    """Boxes from left to right, each in the column after all that it needs."""
    columns = _columns(nodes)
    tallest = max(map(len, columns))
    width, height = _PITCH * len(columns) - _PITCH + _BOX, 62 * tallest - 12
    places = {
        node.name: (_PITCH * x, (height - (62 * len(column) - 12)) / 2 + 62 * y)
        for x, column in enumerate(columns)
        for y, node in enumerate(column)
    }
    parts = []
    for node in nodes:
        x, y = places[node.name]
        for need in node.needs:
            a, b, c, d = places[need][0] + _BOX, _short(places[need][1] + 25), x, _short(y + 25)
            parts.append(f'<path class="edge" d="M{a},{b} C{a + 15},{b} {c - 15},{d} {c},{d}"/>')
    for node in nodes:
        parts += _box(node, *places[node.name])
    said = "graph: " + ", ".join(" ".join(node.lines) for node in nodes)
    return _svg(width, height, said, parts, f' width="{width:g}" height="{height:g}"')


def _columns(nodes: Sequence[Node]) -> list[list[Node]]:
    """``nodes`` stand after what they need."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[need] for need in node.needs), default=-1)
    return [[node for node in nodes if depth[node.name] == at] for at in range(max(depth.values()) + 1)]


def _box(node: Node, x: float, y: float) -> Iterator[str]:
    said = escape(" · ".join(node.lines))
    yield f'<g class="node {node.state}"><title>{said}</title>'
    yield f'<rect x="{_short(x + 1)}" y="{_short(y + 1)}" width="{_BOX - 2}" height="48" rx="6"/>'
    for at, line in enumerate(node.lines[:2]):
        shown = line if len(line) <= _BOX_CHARS else f"{line[: _BOX_CHARS - 1]}…"
        yield f'<text x="{_short(x + 10)}" y="{_short(y + 21 + 17 * at)}">{escape(shown)}</text>'
    yield "</g>"
