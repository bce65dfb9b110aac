"""Assemble the content of a report of runs, independent of its format. Reads only two runs' code files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pipeline.comparing import curves as curving
from pipeline.comparing.charts import COLOURS, Line, Node
from pipeline.comparing.curves import Band
from pipeline.comparing.differing import Comparison, compare
from pipeline.comparing.groups import Group, differing_fields, flat_config, grouped, letters, metrics_of, shown
from pipeline.comparing.reading import SPEEDS, ComparedRun
from pipeline.core import program
from pipeline.core.redact import hide
from pipeline.core.tables import counted
from pipeline.keys.content_key import Difference
from pipeline.runs.contents import set_apart
from pipeline.runs.metrics_file import MetricsRow
from pipeline.steps.lineage import PastStep
from pipeline.sweep.report import BY, MINIMIZE, SHOWN, direction_of

_MOST_CHARTS = 8
_MOST_BOXES = 10  # per column of a graph
_MOST_AXES = 7
_MOST_FIELDS = 20  # listed differences from the nearest run
_FIRST = ("val/accuracy", "train/loss", "val/loss")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A trial of a sweep without a run folder, as described by the sweep's journal."""

    key: str
    what: str
    state: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        title: the subject, in a few words.
        why: the purpose of the runs: the sweep's arguments, or the differences from the nearest finished run.
        command: the command line that creates the same report.
        unix_time: when the report was created.
        comparison: the configurations, the best first; ``by`` is the deciding metric, and ``direction`` is ``maximize``
            or ``minimize``. If None, the configuration named first is first.
        colours: label → number of the configurations that have a colour.
        bands: metric → one curve per configuration.
        nodes: the dependency graph of data, runs and report.
        axes, lines: parallel coordinates; no axes if there is nothing to show.
        absent: trials that were started and have no run folder.
    """

    title: str
    why: tuple[str, ...]
    command: str
    unix_time: float
    by: str
    direction: str | None
    comparison: Comparison
    colours: Mapping[str, int]
    bands: Mapping[str, tuple[Band, ...]]
    nodes: tuple[Node, ...]
    axes: tuple[str, ...]
    lines: tuple[Line, ...]
    absent: tuple[Absent, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.comparison.groups

    @property
    def runs(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def columns(self) -> list[str]:
        """The metrics of the table of configurations: the usual ones first, then others."""
        usual = [name for name in dict.fromkeys((self.by, *SHOWN)) if name in self.comparison.metrics]
        return [*usual, *(name for name in self.comparison.metrics if name not in usual)]

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


def report(
    runs: Sequence[ComparedRun],
    rows: Mapping[str, Sequence[MetricsRow]],
    *,
    title: str,
    why: Sequence[str],
    command: str,
    unix_time: float,
    by: str = BY,
    goals: Mapping[str, str] = MappingProxyType({}),
    absent: Sequence[Absent] = (),
) -> Report:
    """Assemble a report. ``rows`` are those of metrics.jsonl by run key; ``runs`` has at least one.

    ``goals``: metric → direction, for the objectives of a search.
    """
    groups, by, direction = best_first(grouped(runs), by, goals)
    wanted = _charted(curving.names(rows.values()), by)
    bands = {name: tuple(curving.band(group, rows, name, "step") for group in groups) for name in wanted}
    axes, lines = _parallel(groups, by)
    return Report(
        title=title,
        why=tuple(why),
        command=command,
        unix_time=unix_time,
        by=by,
        direction=direction,
        comparison=compare(groups),
        colours={group.label: number for number, group in enumerate(groups[:COLOURS])},
        bands=bands,
        nodes=tuple(_graph(groups)),
        axes=axes,
        lines=lines,
        absent=tuple(absent),
    )


def best_first(
    groups: Sequence[Group], by: str = BY, goals: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Group], str, str | None]:
    """Order the configurations for all views that select runs automatically.

    Args:
        by: the deciding metric if any group has it; otherwise the first whose name implies a direction is used.
        goals: metric → direction, for the objectives of a search.

    Returns:
        The configurations, the best first and labelled in that order; the metric; ``maximize`` or ``minimize``, or None
        if the metric's name doesn't imply a direction.
    """
    by = by if any(by in group.figures for group in groups) else _first_by(metrics_of(groups), goals) or by
    direction = direction_of(by, goals)
    return _ranked(groups, by, direction), by, direction


def _first_by(names: Sequence[str], goals: Mapping[str, str]) -> str:
    """Return the first of a script's metrics with a known direction; else the first; or ''."""
    known = (name for name in names if name not in SPEEDS and direction_of(name, goals) is not None)
    return next(known, next(iter(names), ""))


def of_nearest(nearest: tuple[str, Sequence[Difference]] | None) -> list[str]:
    """Describe why a run was made: the differences from the nearest finished run."""
    if nearest is None:
        return ["there is no other finished run"]
    key, differing = nearest
    lines = [hide(str(item)) for item in differing[:_MOST_FIELDS]]
    lines += [f"and {counted(more, 'more field')}"] if (more := len(differing) - _MOST_FIELDS) > 0 else []
    return [f"the nearest other finished run is {key}; it differs in:" if lines else f"as {key}", *lines]


def _ranked(groups: Sequence[Group], by: str, direction: str | None) -> list[Group]:
    """Sort the best first, groups without the figure last, and label them in that order."""
    sign = 0.0 if direction is None else 1.0 if direction == MINIMIZE else -1.0

    def place(group: Group) -> float:
        figure = group.figures.get(by)
        return sign * figure.over.mean if figure is not None and figure.over is not None else math.inf

    return [replace(group, label=letters(number)) for number, group in enumerate(sorted(groups, key=place))]


def _charted(names: Sequence[str], by: str) -> list[str]:
    """Return the metrics whose curves are shown, the most important first."""
    first = [name for name in dict.fromkeys((by, *_FIRST)) if name in names]
    return [*first, *(name for name in names if name not in first)][:_MOST_CHARTS]


# -------------------------------------------------------------------------------- parallel coordinates
def _parallel(groups: Sequence[Group], by: str) -> tuple[tuple[str, ...], tuple[Line, ...]]:
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
            said = "no figure" if last is None else f"{by} {last:.4g}"
            title = f"{group.label} {group.title} seed {run.seed}: {said}"
            lines.append(Line(title=title, values=(*(_axis_value(known.get(name)) for name in fields), last)))
    return (*fields, by), tuple(lines)


def _axis_value(value: Any) -> float | str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return None if value is None else shown(value)


# ----------------------------------------------------------------------------------------------- graph
def _graph(groups: Sequence[Group]) -> list[Node]:
    """Return the boxes of the graph: data and initial weights, a training and evaluation per configuration, the
    report."""
    nodes: dict[str, Node] = {}
    ends: list[str] = []
    for group in groups[:_MOST_BOXES]:
        needs = _sources(group.first, nodes)
        state = "done" if group.n == len(group.runs) else "failed" if any(run.failure for run in group.runs) else "todo"
        runs = group.first.key if len(group.runs) == 1 else f"{group.n} of {counted(len(group.runs), 'run')}"
        brief = " ".join(set_apart(group.words, group.first.config)) or group.title
        train = Node(name=f"train {group.label}", lines=(f"{group.label} {brief}", runs), state=state, needs=needs)
        nodes[train.name] = train
        ends.append(_evaluated(train, group, nodes))
    if rest := groups[_MOST_BOXES:]:
        sources = dict.fromkeys(name for group in rest for name in _sources(group.first, nodes))
        done = sum(group.n > 0 for group in rest)
        lines = (f"{len(rest)} more", f"configurations, {done} done")
        nodes["more"] = Node(name="more", lines=lines, needs=tuple(sources))
        ends.append("more")
    return [*nodes.values(), Node(name="report", lines=("report", "this page"), state="done", needs=tuple(ends))]


def _evaluated(train: Node, group: Group, nodes: dict[str, Node]) -> str:
    """Return the name of the last box of these runs; scripts have no evaluation."""
    if not program.of(group.first.config).evaluated:
        return train.name
    state = ("done", "done") if group.n else ("to do", "todo")
    made = Node(name=f"evaluate {group.label}", lines=("evaluate", state[0]), state=state[1], needs=(train.name,))
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
