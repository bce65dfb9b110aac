"""Comparisons and curves in a notebook: what `doit compare` and `doit plot` show, as objects that a cell displays."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.commands import compare as choosing
from pipeline.cli.invocation import Invocation
from pipeline.cli.session import Session
from pipeline.comparing import curves, drawing, tables
from pipeline.comparing.curves import FORMATS
from pipeline.comparing.differing import Comparison as Differences
from pipeline.comparing.differing import compare as compared
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.files import write_atomic
from pipeline.notebook.run import Run

_COLUMNS = 120


@dataclass(frozen=True)
class Comparison:
    """What differs between runs, compared with the spread over seeds. A cell and ``print`` show it as a table."""

    _differences: Differences

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, as `doit compare --json` has it."""
        return tables.as_json(self._differences)

    def __str__(self) -> str:
        return tables.text(self._differences, _COLUMNS)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class Plot:
    """Curves of one metric. A cell shows them; ``save`` writes a file."""

    _bands: tuple[curves.Band, ...]
    metric: str
    x: str
    log: bool

    def save(self, path: str | Path) -> Path:
        """Write an .svg, .png or .pdf, and return its path. Raises UsageError: another ending; OSError."""
        target = Path(path)
        form = target.suffix.lower().removeprefix(".")
        if form not in FORMATS:
            raise UsageError(f"{target} must end in {', '.join(f'.{name}' for name in FORMATS)}")
        write_atomic(target, self._drawn(form))
        return target

    def _repr_png_(self) -> bytes:
        return self._drawn("png")

    def _drawn(self, form: str) -> bytes:
        return drawing.curve_file(list(self._bands), metric=self.metric, axis=self.x, form=form, log=self.log)


def compare(*runs: Run | str, metric: str | None = None) -> Comparison:
    """Compare runs: what `doit compare` shows.

    Args:
        runs: runs, keys (or their first digits), or overrides that choose runs (``"experiment=quickstart"``). Runs that
            differ only in their seed form one configuration.
        metric: only this metric.

    Raises:
        UsageError: no run is chosen, or none has the metric.
    """
    current, keys = _chosen("compare", runs)
    groups = choosing.in_order(choosing.chosen(current, keys), keys)
    return Comparison(compared(groups, [] if metric is None else [metric]))


def plot(*runs: Run | str, metric: str | None = None, x: str = "step", log: bool = False) -> Plot:
    """Plot a metric with its spread over seeds: what `doit plot` draws.

    Args:
        runs: as for ``compare``.
        metric: default: val/accuracy, or the first metric of a script.
        x: "step", "epoch" or "minutes".
        log: with a logarithmic axis of values.

    Raises:
        UsageError: no run is chosen, none has such a curve, or an axis that there is none of.
    """
    if x not in curves.AXES:
        raise UsageError(f"x={x} is no axis; {suggestion(x, curves.AXES)}")
    current, keys = _chosen("plot", runs)
    name, bands, _ = choosing.bands_of(choosing.chosen(current, keys), metric, x, named_runs=keys)
    return Plot(tuple(curves.above_0(band) if log else band for band in bands), name, x, log)


def _chosen(verb: str, runs: tuple[Run | str, ...]) -> tuple[Session, list[str]]:
    """Return the session and the keys of the named runs; a text with = is an override."""
    texts = [item.key if isinstance(item, Run) else item for item in runs]
    keys = [text for text in texts if "=" not in text]
    return Session(Invocation(verb=verb, overrides=tuple(text for text in texts if "=" in text))), keys
