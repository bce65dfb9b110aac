"""`doit plot`: curves of a metric, in the terminal or as a picture."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli import clone
from pipeline.cli.choosing import chosen
from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import relative, session
from pipeline.core.errors import PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import asked_for, expanded, write_atomic
from pipeline.core.printable import takes_colours
from pipeline.core.tables import folded
from pipeline.runs.index import ALTERED

if TYPE_CHECKING:
    from pipeline.comparing.curves import Band

_METRIC = "val/accuracy"
_HEIGHT = 22  # lines
_MOST = 8  # curves that can be told apart


def plot() -> None:
    """Raises UsageError: no run is meant, none has such a curve, or a kind of file that there is none of."""
    from pipeline.comparing import curves, terminal_plot

    options = session().asked.options
    axis = options.get("x", "step")
    if axis not in curves.AXES:
        raise UsageError(f"x={axis} is no axis; {suggestion(axis, curves.AXES)}")
    log, target = is_on(options, "log"), _target(options.get("file"))
    metric, bands, more = _bands(options.get("metric"), axis)
    bands = [curves.above_0(band) for band in bands] if log else bands
    if target is not None:
        _write(target, bands, metric, axis, log=log)
        return
    columns = shutil.get_terminal_size().columns
    colour = takes_colours(sys.stdout, os.environ)
    drawn = terminal_plot.plot(bands, metric=metric, axis=axis, width=columns, height=_HEIGHT, log=log, colour=colour)
    say(drawn, painted=colour)
    more_of_them = f"; {more} more configurations: name fewer" if more else ""
    say(folded(f"{terminal_plot.NOTE}{more_of_them}", columns))


def _bands(asked: str | None, axis: str) -> tuple[str, list[Band], int]:
    """The metric, the first configurations that have its curve, and how many more there are."""
    from pipeline.comparing import curves
    from pipeline.comparing.groups import grouped

    runs = chosen(session(), session().asked.paths)
    rows = curves.of_runs(runs)
    known = sorted({name for of_run in rows.values() for row in of_run for name in row.metrics})
    of_scripts = [] if _METRIC in known else curves.names(rows.values())  # metrics have names of their own
    metric = asked or next(iter(of_scripts), _METRIC)
    for run in runs:
        if run.state == ALTERED:
            note(f"left out: {run.key} is {run.reservation}")
    bands = [curves.band(group, rows, metric, axis) for group in grouped(runs)]
    found = [band for band in bands if band.points]
    if not found:
        told = f"; {suggestion(metric, known)}" if metric not in known else f", over x={axis}"
        raise UsageError(f"metric={metric}: none of these runs has such a curve{told}")
    return metric, found[:_MOST], max(0, len(found) - _MOST)


def _target(told: str | None) -> Path | None:
    """Raises UsageError: a kind of file that can't be drawn, or a place that none is written to."""
    from pipeline.comparing.drawing import FORMATS

    if told is None:
        return None
    path = asked_for(clone.started_in() / expanded(told, f"file={told}"), f"file={told}")
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise UsageError(f"file={told} must end in {', '.join(f'.{form}' for form in FORMATS)}")
    return path


def _write(target: Path, bands: list[Band], metric: str, axis: str, *, log: bool) -> None:
    """Raises PacelineError."""
    from pipeline.comparing.drawing import curve_file

    form = target.suffix.lower().removeprefix(".")
    try:
        write_atomic(target, curve_file(bands, metric=metric, axis=axis, form=form, log=log))
    except OSError as error:
        raise PacelineError(f"{target} can't be written: {os_reason(error)}", hint="file=<another path>") from error
    say(relative(target))
