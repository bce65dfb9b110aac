"""Curves of a metric: the points of each run, the mean and spread over a group's runs (a *band*), and a plot of bands
in a terminal. ``drawing`` draws the same bands with matplotlib."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from pipeline.comparing.groups import ComparedRun, Group
from pipeline.core.printable import printable
from pipeline.core.tables import wrapped
from pipeline.runs import metrics_file
from pipeline.runs.index import ALTERED
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.results import with_spread
from trainers.contract import run_folder

AXES = ("step", "epoch", "minutes")
FORMATS = ("pdf", "png", "svg")
_MOST_POINTS = 400  # per curve over minutes


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's values of a metric."""

    x: tuple[float, ...]  # increasing
    y: tuple[float, ...]  # NaN or infinite: a gap in the curve
    passes: int = 1  # over the steps: a script that counts its steps anew makes another; the curve is of the last one

    @property
    def gaps(self) -> int:
        return sum(not math.isfinite(value) for value in self.y)


@dataclass(frozen=True, kw_only=True)
class MeanPoint:
    """The mean of ``n`` finite values at ``x``; ``std`` is their sample standard deviation (None if n is 1)."""

    x: float
    mean: float
    std: float | None
    n: int

    @property
    def ends(self) -> tuple[float, float]:
        """One standard deviation below the mean and above it."""
        std = self.std or 0.0
        return self.mean - std, self.mean + std


@dataclass(frozen=True, kw_only=True)
class Band:
    """A group's curve: the mean over its runs, and their spread."""

    label: str
    title: str
    parts: tuple[tuple[MeanPoint, ...], ...]  # the pieces between gaps
    gaps: int  # number of non-finite values of all runs
    n: int  # number of runs
    unfinished: str = ""  # the number of runs in each other state than finished, ``1 FAILED``, or ''
    passes: int = 1  # the most of any run, see Curve
    below: int = 0  # number of points at or below 0, which a logarithmic axis leaves out

    @property
    def count(self) -> str:
        """``3``, or ``1 to 3`` if some points are means of fewer runs."""
        fewest = min((point.n for point in self.points), default=self.n)
        return f"{self.n}" if fewest == self.n else f"{fewest} to {self.n}"

    @property
    def about_passes(self) -> str:
        """A note about restarted steps for the end of a line; usually ''."""
        return f", the last of {self.passes} passes over the steps (x=minutes: all)" if self.passes > 1 else ""

    @property
    def points(self) -> list[MeanPoint]:
        return [point for part in self.parts for point in part]


def rows_of_runs(runs: Iterable[ComparedRun]) -> dict[str, list[MetricsRow]]:
    """Return run key → rows of metrics.jsonl; none for an altered run."""
    return {run.key: [] if run.state == ALTERED else rows(run.folder) for run in runs}


def rows(run_dir: Path) -> list[MetricsRow]:
    """Return the valid lines of metrics.jsonl; empty if the file can't be read."""
    try:
        return metrics_file.rows(run_dir / run_folder.METRICS)
    except OSError:
        return []


def drawable_metrics(rows_of_runs: Iterable[Sequence[MetricsRow]]) -> list[str]:
    """Return the metrics that can be drawn as curves: in at least one run they have points at more than one step."""
    drawable = set[str]()
    for logged in rows_of_runs:
        steps = defaultdict[str, set[int]](set)
        for row in logged:
            for name in row.metrics:
                steps[name].add(row.step)
        drawable |= {name for name in steps if len(steps[name]) > 1}
    return sorted(drawable)


def curve(logged: Sequence[MetricsRow], metric: str, axis: str) -> Curve:
    """Return the curve of one run. Of several values at a step the last one counts: a script may count steps anew."""
    having = [row for row in logged if metric in row.metrics]
    start = min((row.time_s for row in logged), default=0.0)
    if axis == "minutes":
        points = {(row.time_s - start) / 60: row.metrics[metric] for row in having}
    else:
        pairs = [(row.step if axis == "step" else row.epoch, row.metrics[metric]) for row in having]
        points = {float(x): value for x, value in pairs if x is not None}
    ordered = sorted(points)
    passes = 1 + sum(after.step <= before.step for before, after in pairwise(having)) if axis == "step" else 1
    return Curve(x=tuple(ordered), y=tuple(points[x] for x in ordered), passes=passes)


def band(group: Group, rows_by_run: Mapping[str, Sequence[MetricsRow]], metric: str, axis: str) -> Band:
    """Return mean and spread over a group's runs in any state. ``rows_by_run``: run key → rows of metrics.jsonl."""
    curves = [item for run in group.runs if (item := curve(rows_by_run[run.key], metric, axis)).x]
    states = [run.state for run in group.runs if not run.counts and run.state != ALTERED]
    # no two runs have values at the same minutes: these are sampled evenly, and values interpolated
    positions = _evenly(curves) if axis == "minutes" else sorted({x for item in curves for x in item.x})
    parts: list[list[MeanPoint]] = [[]]
    for x in positions:
        values = [value for item in curves if (value := _value(item, x, between=axis == "minutes")) is not None]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            parts[-1].append(_point(x, finite))
        elif values and parts[-1]:  # only non-finite values: interrupt the line
            parts.append([])
    return Band(
        label=group.label,
        title=group.title,
        parts=tuple(tuple(part) for part in parts if part),
        gaps=sum(item.gaps for item in curves),
        n=len(curves),
        passes=max((item.passes for item in curves), default=1),
        unfinished=", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
    )


def _point(x: float, values: Sequence[float]) -> MeanPoint:
    """Return the mean and spread at ``x``."""
    n = len(values)  # the exact sums of the standard library's ``statistics`` would take most of a report's time
    mean = sum(values) / n
    squares = sum((value - mean) * (value - mean) for value in values)
    return MeanPoint(x=x, mean=mean, std=math.sqrt(squares / (n - 1)) if n > 1 else None, n=n)


def positive_parts(band: Band) -> Band:
    """Return the band as a logarithmic axis can show it, with gaps at non-positive values."""
    pieces = []
    for part in band.parts:
        pieces += [(above, tuple(points)) for above, points in groupby(part, lambda point: point.mean > 0)]
    below = sum(len(piece) for above, piece in pieces if not above)
    return replace(band, parts=tuple(piece for above, piece in pieces if above), below=below)


def parts_with_spread(part: Sequence[MeanPoint]) -> list[list[MeanPoint]]:
    """Return the stretches of a piece whose points are means of several runs. A band of width 0 at the points of a
    single run would look like seeds that agree."""
    stretches = [list(points) for has_std, points in groupby(part, lambda point: point.std is not None) if has_std]
    return [points for points in stretches if any(point.std for point in points)]


def thinned(part: Sequence[MeanPoint], most: int) -> list[MeanPoint]:
    """Return at most ``most`` points, evenly chosen, including the first and the last."""
    if len(part) <= most:
        return [*part]
    return [part[round(number * (len(part) - 1) / (most - 1))] for number in range(most)]


def _evenly(curves: Sequence[Curve]) -> list[float]:
    """Return evenly spaced positions over the whole range of the curves."""
    if not curves:
        return []
    low, high = min(item.x[0] for item in curves), max(item.x[-1] for item in curves)
    count = min(_MOST_POINTS, max(len(item.x) for item in curves))
    if count < 2 or high <= low:
        return [low]
    # the last one exactly, despite rounding
    return [*(low + (high - low) * number / (count - 1) for number in range(count - 1)), high]


def _value(curve: Curve, x: float, *, between: bool) -> float | None:
    """Return the value at x; ``between``: interpolated linearly. None if there is no point, or none on both sides."""
    before = bisect_right(curve.x, x) - 1  # the index of the last point up to x
    if before >= 0 and curve.x[before] == x:
        return curve.y[before]
    if not between or before < 0 or before + 1 >= len(curve.x):
        return None
    share = (x - curve.x[before]) / (curve.x[before + 1] - curve.x[before])
    return curve.y[before] + share * (curve.y[before + 1] - curve.y[before])


def span_of(values: Iterable[float], *, log: bool) -> tuple[float, float] | None:
    """Return the least and greatest value that can be drawn (above 0 on a logarithmic axis); None: there is none."""
    # distances of values beyond 1e300 overflow
    drawable = [value if abs(value) > 1e-300 else 0.0 for value in values if abs(value) < 1e300]
    kept = [value for value in drawable if value > 0 or not log]
    return (min(kept), max(kept)) if kept else None


def within(span: tuple[float, float], value: float) -> float:
    return min(span[1], max(span[0], value))


# ------------------------------------------------------------------------------------------ in a terminal
_BLOCKS = " ▁▂▃▄▅▆▇█"
_SPREAD = "░"
NOTE = f"{_SPREAD} one standard deviation over seeds above the mean"
_COLOURS = (34, 33, 32, 35, 36, 31)  # ANSI: blue, yellow, green, magenta, cyan, red
_LEAST_WIDTH, _MOST_ROWS = 30, 8
Span = tuple[float, float]


def plot(
    bands: Sequence[Band], *, metric: str, axis: str, width: int, height: int, log: bool = False, colour: bool = False
) -> str:
    """Return the curves as text, one below the other, each with one standard deviation as a shade and with a caption.
    ``width`` and ``height``: the size of the whole plot in characters; ``colour`` allows ANSI colours."""
    points = [point for band in bands for point in band.points]
    y_span = span_of((value for point in points for value in (point.mean, *point.ends)), log=log)
    if y_span is None:
        return f"{printable(metric)}: nothing to draw" + (" above 0, as a logarithmic axis needs" if log else "")
    x_span = min(point.x for point in points), max(point.x for point in points)
    rows = min(_MOST_ROWS, max(1, (height - 1) // len(bands) - 1))
    head = f"{printable(metric)} {_ends(y_span)}{', logarithmic' if log else ''}, over {axis} {_ends(x_span)}"
    lines = wrapped(head, width)
    for number, band in enumerate(bands):
        paint = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{{}}\x1b[0m" if colour else "{}"
        lines += [paint.format(row) for row in _area(band, x_span, y_span, max(_LEAST_WIDTH, width), rows, log=log)]
        first, *others = _caption(band, width)
        lines += [paint.format(band.label) + first.removeprefix(band.label), *others]
    return "\n".join(lines)


def _caption(band: Band, width: int) -> list[str]:
    gaps = f", {band.gaps} values are no number: gaps" if band.gaps else ""
    gaps += f", {band.below} points at or below 0 aren't drawn" if band.below else ""
    last = band.points[-1] if band.points else None
    of_fewer = f" (n {last.n})" if last is not None and last.n < band.n else ""
    latest = "no points" if last is None else f"last {with_spread(last.mean, last.std)}{of_fewer}"
    count = f"n {band.n}{f' ({band.unfinished})' if band.unfinished else ''}"
    return wrapped(f"{band.label}  {band.title}  {count}, {latest}{gaps}{band.about_passes}", width)


def _area(band: Band, x_span: Span, y_span: Span, columns: int, rows: int, *, log: bool) -> list[str]:
    """Return the rows of a curve from top to bottom. A point extends to the next one of its piece."""
    cells: list[Span] = [(0, 0)] * columns  # mean and upper end, in eighths of a row
    for part in band.parts:
        starts = [round(_share(point.x, x_span) * (columns - 1)) for point in part]
        for point, start, end in zip(part, starts, [*starts[1:], starts[-1]], strict=True):
            mean, top = (1 + _share(value, y_span, log=log) * (8 * rows - 1) for value in (point.mean, point.ends[1]))
            cells[start : max(end, start + 1)] = [(mean, top)] * max(1, end - start)

    def block(cell: Span, floor: int) -> str:  # floor: the lower edge of the row, in eighths
        filled = min(8, max(0, round(cell[0]) - floor))
        return _BLOCKS[filled] if filled else _SPREAD if cell[1] >= floor + 4 else " "

    return ["".join(block(cell, 8 * row) for cell in cells).rstrip() for row in reversed(range(rows))]


def _share(value: float, span: Span, *, log: bool = False) -> float:
    """Return where a value lies in a span, from 0 to 1."""
    low, value, high = (math.log10(one) if log else one for one in (span[0], within(span, value), span[1]))
    return (value - low) / (high - low) if high > low else 0.5


def _ends(span: Span) -> str:
    return " to ".join(f"{end:,.10g}" if float(end).is_integer() else f"{end:.3g}" for end in span)
