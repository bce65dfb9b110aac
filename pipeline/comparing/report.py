"""Assemble the content of a report of runs, independent of its format. Reads only two runs' code files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pipeline.comparing import curves as curving
from pipeline.comparing import tables, timeline
from pipeline.comparing.charts import COLOURS, Cell, Line, Node, level
from pipeline.comparing.curves import Band
from pipeline.comparing.differing import Comparison, Row, compare
from pipeline.comparing.groups import (
    Difference,
    Group,
    differing_fields,
    field_value,
    flat_config,
    grouped,
    letters,
    metrics_of,
    shown,
)
from pipeline.comparing.reading import SPEEDS, ComparedRun
from pipeline.comparing.timeline import Attempt, Timeline
from pipeline.core import program
from pipeline.core.redact import hide
from pipeline.core.tables import counted, first_of, quantity
from pipeline.keys.content_key import Difference as KeyDifference
from pipeline.runs.contents import set_apart, short_names
from pipeline.runs.metrics_file import MetricsRow
from pipeline.steps.source import PastStep
from pipeline.sweep.folder import TrialEntry
from pipeline.sweep.report import BY, MINIMIZE, SHOWN, direction_of

_MOST_CHARTS = 8
_MOST_BOXES = 10  # per column of a graph
_MOST_AXES = 7
_MOST_PANELS = 3  # metrics of the differences from the best
MOST_AGAINST = 30
"""Configurations compared with the best one on a page."""
_MOST_CELLS, _FULL = 12, 0.6  # of a grid: values of a field, share of the combinations that were run
_MOST_FIELDS = 20  # listed differences from the nearest run
_MOST_COLUMNS = 6  # differing fields with a column of their own
_MOST_NAMED = 3  # differing fields in a title
_IN_WHAT = ("experiment", "dataset", "model", "program", "program.script")  # said by a run's ``what``
_FIRST = ("val/accuracy", "train/loss", "val/loss")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A trial of a sweep without a run folder, as described by the sweep's journal."""

    key: str
    what: str
    state: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The means of a metric by two fields. ``about``: the fields' names and the metric."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    about: tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        subject: ``Sweep NAME``, ``Run KEY`` or ``3 runs``.
        why: the purpose of the runs: the sweep's arguments, or the differences from the nearest finished run.
        command: the command line that creates the same report.
        unix_time: when the report was created.
        comparison: the configurations, the best first; ``by`` is the deciding metric, and ``direction`` is ``maximize``
            or ``minimize``. If None, the configuration named first is first.
        rows: run key → its rows of metrics.jsonl.
        absent: trials that were started and have no run folder.
        trials: the journal of a sweep.
    """

    subject: str
    why: tuple[str, ...]
    command: str
    unix_time: float
    by: str
    direction: str | None
    comparison: Comparison
    rows: Mapping[str, Sequence[MetricsRow]]
    absent: tuple[Absent, ...]
    trials: Sequence[TrialEntry]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.comparison.groups

    @property
    def runs(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def title(self) -> str:
        """What was run: ``digits small_cnn sgd: lr × global_batch_size``, or a single run's settings."""
        groups, run = self.groups, self.groups[0].first
        common = [word for word in run.what.split() if all(word in group.first.what.split() for group in groups)]
        head = " ".join(common) or counted(len(groups), "configuration")
        names = [*short_names(differing_fields([group.first for group in groups])).values()]
        if names:
            return f"{head}: {' × '.join(names) if len(names) <= _MOST_NAMED else first_of(names, _MOST_NAMED)}"
        if len(self.runs) == 1:
            words = [word for word in run.overrides if word.lstrip("+").partition("=")[0] not in _IN_WHAT]
            return " ".join((head, *set_apart(words, run.config)))
        return f"{head}, {counted(len({repr(one.seed) for one in self.runs}), 'seed')}"

    @cached_property
    def colours(self) -> dict[str, int]:
        """Label → number of the configurations that have a colour."""
        return {group.label: number for number, group in enumerate(self.groups[:COLOURS])}

    @cached_property
    def bands(self) -> dict[str, tuple[Band, ...]]:
        """Metric → one curve per configuration, the most important first."""
        names = curving.names(self.rows.values())
        first = [name for name in dict.fromkeys((self.by, *_FIRST)) if name in names]
        wanted = [*first, *(name for name in names if name not in first)][:_MOST_CHARTS]
        return {name: tuple(curving.band(group, self.rows, name, "step") for group in self.groups) for name in wanted}

    @property
    def columns(self) -> list[str]:
        """The metrics of the table of configurations: the usual ones first, then others."""
        usual = [name for name in dict.fromkeys((self.by, *SHOWN)) if name in self.comparison.metrics]
        return [*usual, *(name for name in self.comparison.metrics if name not in usual)]

    @property
    def fields(self) -> tuple[Row, ...]:
        """The differing fields that each have a column in tables of configurations; empty if they are too many."""
        rows = self.comparison.parts.get("configuration", ())
        return rows if len(rows) <= _MOST_COLUMNS else ()

    @property
    def conclusion(self) -> str:
        return tables.conclusion(self.comparison, self.by, self.direction)

    @property
    def failures(self) -> list[ComparedRun]:
        return [run for run in self.runs if run.failure]

    @property
    def summary(self) -> str:
        """``6 of 9 runs finished, 3 configurations``; for a single run, its state."""
        count, done = len(self.runs) + len(self.absent), sum(run.counts for run in self.runs)
        if count == 1:
            return self.runs[0].state
        return f"{done} of {counted(count, 'run')} finished, {counted(len(self.groups), 'configuration')}"

    @property
    def intervals(self) -> dict[str, list[tuple[str, Difference] | None]]:
        """Metric → title and difference of each configuration from the best, for the first few metrics.

        None where the difference is unknown, or nothing may be claimed.
        """
        by_metric = {}
        for name in self.columns[:_MOST_PANELS]:
            row = [
                None
                if against.reservation or (item := against.difference(name)) is None
                else (f"{against.label} {name} {tables.interval(item)}", item)
                for against in self.comparison.against[:MOST_AGAINST]
            ]
            if any(row):
                by_metric[name] = row
        return by_metric

    @cached_property
    def nodes(self) -> list[Node]:
        """The dependency graph of data, runs and report."""
        return _graph(self.groups)

    @cached_property
    def grid(self) -> Grid | None:
        """The means by two fields; None unless two fields differ and most of their combinations were run."""
        return _grid(self.groups, self.by, self.direction)

    @cached_property
    def slots(self) -> Timeline | None:
        """The trials of a sweep by slot; None if it isn't a sweep, or of an older version."""
        return timeline.of_sweep(self.trials, self.groups, self.rows, self.colours)

    @cached_property
    def attempts(self) -> dict[str, list[Attempt]]:
        """Run key → its attempts, of a single run or of those that paused or were started again."""
        of_runs = {run.key: timeline.attempts(run, self.rows.get(run.key, ())) for run in self.runs}
        return {
            key: known
            for key, known in of_runs.items()
            if known and (len(of_runs) == 1 or len(known) > 1 or known[0].pauses)
        }


def report(
    runs: Sequence[ComparedRun],
    rows: Mapping[str, Sequence[MetricsRow]],
    *,
    subject: str,
    why: Sequence[str],
    command: str,
    unix_time: float,
    by: str = BY,
    goals: Mapping[str, str] = MappingProxyType({}),
    absent: Sequence[Absent] = (),
    trials: Sequence[TrialEntry] = (),
) -> Report:
    """Assemble a report of at least one run. ``goals``: metric → direction, for the objectives of a search."""
    groups, by, direction = best_first(grouped(runs), by, goals)
    return Report(
        subject=subject, why=tuple(why), command=command, unix_time=unix_time, by=by, direction=direction,
        comparison=compare(groups), rows=rows, absent=tuple(absent), trials=trials,
    )  # fmt: skip


def best_first(
    groups: Sequence[Group], by: str = BY, goals: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Group], str, str | None]:
    """Order the configurations for all views that select runs automatically.

    ``by`` decides if any group has it, otherwise the first metric whose name implies a direction, or that has one in
    ``goals`` (of a search). Return the configurations, the best first and labelled in that order, those without the
    figure last; the metric; and ``maximize`` or ``minimize``, or None if no direction is known.
    """
    by = by if any(by in group.figures for group in groups) else _first_by(metrics_of(groups), goals) or by
    direction = direction_of(by, goals)
    sign = 0.0 if direction is None else 1.0 if direction == MINIMIZE else -1.0

    def place(group: Group) -> float:
        figure = group.figures.get(by)
        return sign * figure.over.mean if figure is not None and figure.over is not None else math.inf

    ranked = [replace(group, label=letters(number)) for number, group in enumerate(sorted(groups, key=place))]
    return ranked, by, direction


def _first_by(names: Sequence[str], goals: Mapping[str, str]) -> str:
    """Return the first of a script's metrics with a known direction; else the first; or ''."""
    known = (name for name in names if name not in SPEEDS and direction_of(name, goals) is not None)
    return next(known, next(iter(names), ""))


def of_nearest(nearest: tuple[str, Sequence[KeyDifference]] | None) -> list[str]:
    """Describe why a run was made: the differences from the nearest finished run."""
    if nearest is None:
        return ["there is no other finished run"]
    key, differing = nearest
    lines = [hide(str(item)) for item in differing[:_MOST_FIELDS]]
    lines += [f"and {counted(more, 'more field')}"] if (more := len(differing) - _MOST_FIELDS) > 0 else []
    return [f"the nearest other finished run is {key}; it differs in:" if lines else f"as {key}", *lines]


# ------------------------------------------------------------------------------------------------ grid
def _grid(groups: Sequence[Group], by: str, direction: str | None) -> Grid | None:
    fields = differing_fields([group.first for group in groups])
    if len(fields) != 2:
        return None
    known = [flat_config(group.first) for group in groups]
    choices = [sorted({_axis_value(field_value(values, name)) for values in known}, key=_in_order) for name in fields]
    if not all(1 < len(values) <= _MOST_CELLS for values in choices):
        return None
    places = [tuple(choices[at].index(_axis_value(field_value(values, name))) for at, name in enumerate(fields))
              for values in known]  # fmt: skip
    full = len(choices[0]) * len(choices[1])
    if len(set(places)) < len(places) or len(places) < _FULL * full:
        return None
    over = [figure.over if (figure := group.figures.get(by)) else None for group in groups]
    means = [one.mean for one in over if one is not None]
    cells = []
    for group, one, (row, column) in zip(groups, over, places, strict=True):
        share = 0.0 if one is None else (one.mean - min(means)) / ((max(means) - min(means)) or 1.0)
        good = None if one is None else level(1 - share if direction == MINIMIZE else share)
        said = "-" if one is None else tables.with_spread(one.mean, one.std, by)
        title = f"{group.label} {group.title}: {by} {said}"
        cells.append(Cell(row=row, column=column, lines=(group.label, said), level=good, title=title))
    names = short_names(fields)
    texts = [tuple(f"{value:.10g}" if isinstance(value, float) else value or "-" for value in side) for side in choices]
    about = (names[fields[0]], names[fields[1]], by)
    return Grid(rows=texts[0], columns=texts[1], cells=tuple(cells), about=about)


def _in_order(value: float | str | None) -> tuple[bool, float, str]:
    """Numbers by size, then names."""
    return (True, 0.0, value or "") if not isinstance(value, float) else (False, value, "")


# -------------------------------------------------------------------------------- parallel coordinates
def parallel(groups: Sequence[Group], by: str) -> tuple[tuple[str, ...], tuple[Line, ...]]:
    """Return axes for the differing fields and a line per run; empty if fewer than two fields differ."""
    fields = differing_fields([group.first for group in groups])[: _MOST_AXES - 1]
    if len(fields) < 2:
        return (), ()
    lines = []
    for group in groups:
        for run in group.runs:
            known = flat_config(run)
            value = run.figures.get(by)
            last = value if value is not None and math.isfinite(value) else None
            said = "no figure" if last is None else f"{by} {quantity(by, last, '.4g')}"
            title = f"{group.label} {group.title} seed {run.seed}: {said}"
            lines.append(Line(title=title, values=(*(_axis_value(field_value(known, name)) for name in fields), last)))
    return (*short_names(fields).values(), by), tuple(lines)


def _axis_value(value: Any) -> float | str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return None if value is None else shown(value)


# ----------------------------------------------------------------------------------------------- graph
def _graph(groups: Sequence[Group]) -> list[Node]:
    """Return the boxes of the graph: data and initial weights, training and evaluation, the report.

    Configurations made from the same boxes share one box of training, which counts them.
    """
    nodes: dict[str, Node] = {}
    by_sources: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        by_sources.setdefault(_sources(group.first, nodes), []).append(group)
    folded = [*by_sources.items()]
    if rest := folded[_MOST_BOXES - 1 :] if len(folded) > _MOST_BOXES else []:
        sources = dict.fromkeys(name for needs, _ in rest for name in needs)
        folded = [*folded[: _MOST_BOXES - 1], (tuple(sources), [group for _, some in rest for group in some])]
    ends = [_trained(needs, some, nodes) for needs, some in folded]
    return [*nodes.values(), Node(name="report", lines=("report", "this page"), state="done", needs=tuple(ends))]


def _trained(needs: tuple[str, ...], groups: Sequence[Group], nodes: dict[str, Node]) -> str:
    """Add the boxes of training and of evaluation (scripts have none); return the name of the last."""
    first = groups[0]
    runs = [run for group in groups for run in group.runs]
    done = sum(group.n for group in groups)
    state = "done" if done == len(runs) else "failed" if any(run.failure for run in runs) else "todo"
    count = runs[0].key if len(runs) == 1 else f"{done} of {counted(len(runs), 'run')}"
    brief = " ".join(set_apart(first.words, first.first.config)) or first.title
    what = f"{first.label} {brief}" if len(groups) == 1 else counted(len(groups), "configuration")
    train = Node(name=f"train {first.label}", lines=(f"train {what}", count), state=state, needs=needs)
    nodes[train.name] = train
    evaluated = [run for run in runs if program.of(run.config).evaluated]
    if not evaluated:
        return train.name
    reports = sum(run.counts for run in evaluated)
    lines = ("evaluate", f"{reports} of {len(evaluated)}" if len(evaluated) > 1 else "done" if reports else "to do")
    state = "done" if reports == len(evaluated) else "todo"
    made = Node(name=f"evaluate {first.label}", lines=lines, state=state, needs=(train.name,))
    nodes[made.name] = made
    return made.name


def _sources(run: ComparedRun, nodes: dict[str, Node]) -> tuple[str, ...]:
    """Add the boxes of a run's data (if any), its steps, and its initial weights; return their names."""
    dataset, digest = run.config.get("dataset"), str(run.parts.get("data") or "")[:12]
    name = dataset.get("name", "data") if isinstance(dataset, Mapping) else "data"
    made = () if run.made_with is None else (_step(run.made_with, nodes),)
    needs: tuple[str, ...] = ()
    if digest or program.of(run.config).is_ours:
        node = Node(name=f"data {digest}", lines=(f"{name}", digest), state="done" if digest else "todo", needs=made)
        nodes.setdefault(node.name, node)
        needs = (node.name,)
    init = run.config.get("init")
    if not isinstance(init, Mapping) or not init:
        return needs
    said = str(next(iter(init.values())))[:12]
    nodes.setdefault(f"init {said}", Node(name=f"init {said}", lines=("initial weights", said), state="done"))
    return (*needs, f"init {said}")


def _step(step: PastStep, nodes: dict[str, Node]) -> str:
    """Add the boxes of a step and of the steps before it; return the name of its box."""
    needs = tuple(_step(before, nodes) for before in step.needs)
    node = Node(name=f"step {step.name} {step.key}", lines=(f"step {step.name}", step.key), state="done", needs=needs)
    return nodes.setdefault(node.name, node).name
