"""What a report of runs holds, whatever it is written as. Nothing is read here but the files of two runs' code."""

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
_MOST_BOXES = 10  # of a graph's column
_MOST_AXES = 7
_MOST_FIELDS = 20  # in which a run differs from the nearest one
_FIRST = ("val/accuracy", "train/loss", "val/loss")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A trial of a sweep that has no run folder: what its sweep's journal tells of it."""

    key: str
    what: str
    state: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        title: what it is about, in a few words.
        why: what the runs were for: the words of the sweep, or what sets a run apart from the nearest finished one.
        command: the command line that asks for the same.
        unix_time: when the report was made.
        comparison: the configurations; ``by`` is the metric that says which is best, and ``direction`` whether more
            (``maximize``) or less of it is better; the best stands first, and where that is None the one named first.
        colours: of the configurations that have a colour their number.
        bands: metric → a curve for each configuration.
        nodes: the graph of what was made of what.
        axes, lines: parallel coordinates; no axes where there is nothing to show.
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
        """``6 of 9 runs finished, 3 configurations``; of one run its state."""
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
    """Put it together. ``rows`` are those of metrics.jsonl by key; ``runs`` has at least one.

    ``goals``: of metrics that a search aimed at whether it made them large or small.
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
    """Return the configurations in the order of every view that chooses its runs by itself, and why it is that.

    Args:
        by: the metric that decides, if any has it; else the first whose name tells whether more or less is better.
        goals: of metrics that a search aimed at whether it made them large or small.

    Returns:
        The configurations, the best first and labelled in that order; the metric; ``maximize`` or ``minimize``, None
        where the metric's name doesn't tell.
    """
    by = by if any(by in group.figures for group in groups) else _first_by(metrics_of(groups), goals) or by
    direction = direction_of(by, goals)
    return _ranked(groups, by, direction), by, direction


def _first_by(names: Sequence[str], goals: Mapping[str, str]) -> str:
    """Of a script's metrics the first of which it is known whether more or less is better; else the first; or ''."""
    known = (name for name in names if name not in SPEEDS and direction_of(name, goals) is not None)
    return next(known, next(iter(names), ""))


def of_nearest(nearest: tuple[str, Sequence[Difference]] | None) -> list[str]:
    """Why a run was made, as far as that can be told: what sets it apart from the nearest finished one."""
    if nearest is None:
        return ["there is no other finished run"]
    key, differing = nearest
    lines = [hide(str(item)) for item in differing[:_MOST_FIELDS]]
    lines += [f"and {counted(more, 'more field')}"] if (more := len(differing) - _MOST_FIELDS) > 0 else []
    return [f"the nearest other finished run is {key}; it differs in:" if lines else f"as {key}", *lines]


def _ranked(groups: Sequence[Group], by: str, direction: str | None) -> list[Group]:
    """The best first, then those that have no figure; labelled in that order."""
    sign = 0.0 if direction is None else 1.0 if direction == MINIMIZE else -1.0

    def place(group: Group) -> float:
        figure = group.figures.get(by)
        return sign * figure.over.mean if figure is not None and figure.over is not None else math.inf

    return [replace(group, label=letters(number)) for number, group in enumerate(sorted(groups, key=place))]


def _charted(names: Sequence[str], by: str) -> list[str]:
    """The metrics whose curves are shown: what matters most first."""
    first = [name for name in dict.fromkeys((by, *_FIRST)) if name in names]
    return [*first, *(name for name in names if name not in first)][:_MOST_CHARTS]


# -------------------------------------------------------------------------------- parallel coordinates
def _parallel(groups: Sequence[Group], by: str) -> tuple[tuple[str, ...], tuple[Line, ...]]:
    """A line for every run that tells its fields, over the fields that differ. Nothing where fewer than two do."""
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
    """Data and what the runs start from, a training for each configuration, its evaluation, the comparison."""
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
    """The name of the last box of these runs: nothing evaluates a script's."""
    if not program.of(group.first.config).evaluated:
        return train.name
    state = ("done", "done") if group.n else ("to do", "todo")
    made = Node(name=f"evaluate {group.label}", lines=("evaluate", state[0]), state=state[1], needs=(train.name,))
    nodes[made.name] = made
    return made.name


def _sources(run: ComparedRun, nodes: dict[str, Node]) -> tuple[str, ...]:
    """The boxes of its data (a script may have none), the steps that made it, and the weights that it starts from;
    shared by all runs."""
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
    """The name of its box; those of the steps before it stand before it."""
    needs = tuple(_step(before, nodes) for before in step.needs)
    node = Node(name=f"step {step.name} {step.key}", lines=(f"step {step.name}", step.key), state="done", needs=needs)
    return nodes.setdefault(node.name, node).name
