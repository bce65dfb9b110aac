"""The report of a sweep, of several runs or of one (`doit report`): its content, and its Markdown and JSON. The page is
rendered by ``drawing.html``, which imports matplotlib."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pipeline.comparing import comparison as tables
from pipeline.comparing import curves as curving
from pipeline.comparing.comparison import Comparison, FieldRow, compare
from pipeline.comparing.curves import Band
from pipeline.comparing.groups import (
    SPEEDS,
    ComparedRun,
    Group,
    MeanDifference,
    differing_fields,
    field_value,
    flat_config,
    grouped,
    letters,
    metrics_of,
    shown,
)
from pipeline.core.redact import hide
from pipeline.core.tables import counted, fenced, first_of
from pipeline.keys.content_key import Difference
from pipeline.runs.contents import distinguishing_labels, short_field_names
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.results import DEFAULT_METRIC, MINIMIZE, SHOWN, direction_of, with_spread

COLOURS = 8
"""The number of coloured curves. Further curves are grey, because more colours are hard to distinguish."""
LEVELS = 5
"""The number of shades of a value, from the worst to the best."""
_MOST_CHARTS = 8
_MOST_PANELS = 3  # metrics for which the differences from the best are drawn
MOST_AGAINST = 30
"""The number of configurations on a page that are compared with the best one."""
_MOST_VALUES, _LEAST_SHARE = 12, 0.6  # of a grid: values of a field; share of the combinations that were run
_MOST_FIELDS = 20  # listed differences from the nearest run
_MOST_COLUMNS = 6  # differing fields with a column of their own
_MOST_NAMED = 3  # differing fields in a title
_IN_WHAT = ("experiment", "dataset", "model", "program", "program.script")  # overrides that ``what`` already shows
_HOST_FACTS = ("hostname", "cpus", "cpu_model", "gpus", "gpu_models", "gpu_driver", "python", "torch")
_NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # variables with a node's network interfaces
_FIRST_CURVES = ("val/accuracy", "train/loss", "val/loss")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A trial in a sweep's journal whose run folder is missing."""

    key: str
    what: str
    state: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A coloured cell of a grid."""

    row: int
    column: int
    lines: tuple[str, ...]  # the text
    level: int | None  # from 0 (the worst) to LEVELS - 1; None: no colour
    title: str = ""  # shown on hover


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The means of a metric by two fields of the configuration."""

    rows: tuple[str, ...]  # the values of the first field
    columns: tuple[str, ...]  # the values of the second field
    cells: tuple[Cell, ...]
    about: tuple[str, str, str]  # the names of the two fields and of the metric


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows."""

    subject: str  # ``Sweep NAME``, ``Run KEY`` or ``3 runs``
    # the purpose of the runs: the sweep's arguments, or the differences from the nearest finished run
    why: tuple[str, ...]
    command: str  # the command line that creates the same report
    unix_time: float  # when the report was created
    by: str  # the metric that decides which configuration is the best
    direction: str | None  # ``maximize`` or ``minimize``; None: it isn't known which is better
    comparison: Comparison  # of the configurations, the best first; without a direction in the order of their runs
    rows: Mapping[str, Sequence[MetricsRow]]  # run key → its rows of metrics.jsonl
    absent: tuple[Absent, ...]  # trials that were started and have no run folder

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.comparison.groups

    @property
    def runs(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def title(self) -> str:
        """What was run: ``digits small_cnn sgd: lr × global_batch_size``, or the settings of a single run."""
        groups, run = self.groups, self.groups[0].first
        common = [word for word in run.what.split() if all(word in group.first.what.split() for group in groups)]
        head = " ".join(common) or counted(len(groups), "configuration")
        names = [*short_field_names(differing_fields([group.first for group in groups])).values()]
        if names:
            return f"{head}: {' × '.join(names) if len(names) <= _MOST_NAMED else first_of(names, _MOST_NAMED)}"
        if len(self.runs) == 1:
            words = [word for word in run.overrides if word.lstrip("+").partition("=")[0] not in _IN_WHAT]
            return " ".join((head, *distinguishing_labels(words, run.config)))
        return f"{head}, {counted(len({repr(one.seed) for one in self.runs}), 'seed')}"

    @cached_property
    def colours(self) -> dict[str, int]:
        """Label → number of the configurations that have a colour."""
        return {group.label: number for number, group in enumerate(self.groups[:COLOURS])}

    @cached_property
    def bands(self) -> dict[str, tuple[Band, ...]]:
        """Metric → one curve per configuration, the most important first."""
        names = curving.drawable_metrics(self.rows.values())
        first = [name for name in dict.fromkeys((self.by, *_FIRST_CURVES)) if name in names]
        wanted = [*first, *(name for name in names if name not in first)][:_MOST_CHARTS]
        return {name: tuple(curving.band(group, self.rows, name, "step") for group in self.groups) for name in wanted}

    @property
    def columns(self) -> list[str]:
        """The metrics of the table of configurations: the usual ones first, then others."""
        usual = [name for name in dict.fromkeys((self.by, *SHOWN)) if name in self.comparison.metrics]
        return [*usual, *(name for name in self.comparison.metrics if name not in usual)]

    @property
    def fields(self) -> tuple[FieldRow, ...]:
        """The differing fields, one column each in tables of configurations; empty if they are too many."""
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
    def intervals(self) -> dict[str, list[tuple[str, MeanDifference] | None]]:
        """Metric → (title, difference from the best) for each other configuration; for the first few metrics. None for
        a configuration whose difference is unknown, or about which nothing may be claimed."""
        by_metric: dict[str, list[tuple[str, MeanDifference] | None]] = {}
        for name in self.columns[:_MOST_PANELS]:
            for against in self.comparison.against[:MOST_AGAINST]:
                item = None if against.reservation else against.difference(name)
                titled = None if item is None else (f"{against.label} {name} {tables.interval(item)}", item)
                by_metric.setdefault(name, []).append(titled)
        return {name: row for name, row in by_metric.items() if any(row)}

    @cached_property
    def grid(self) -> Grid | None:
        """The means by two fields; None unless exactly two differ and most of their combinations were run."""
        return _grid(self.groups, self.by, self.direction)


def report(
    runs: Sequence[ComparedRun],
    rows: Mapping[str, Sequence[MetricsRow]],
    *,
    subject: str,
    why: Sequence[str],
    command: str,
    unix_time: float,
    by: str = DEFAULT_METRIC,
    goals: Mapping[str, str] = MappingProxyType({}),
    absent: Sequence[Absent] = (),
) -> Report:
    """Assemble a report of at least one run.

    Args:
        rows: run key → its rows of metrics.jsonl.
        by: the deciding metric, if any run has it (see ``best_first``).
        goals: metric → direction, of the objectives of a search.
    """
    groups, by, direction = best_first(grouped(runs), by, goals)
    return Report(
        subject=subject, why=tuple(why), command=command, unix_time=unix_time, by=by, direction=direction,
        comparison=compare(groups), rows=rows, absent=tuple(absent),
    )  # fmt: skip


def best_first(
    groups: Sequence[Group], by: str = DEFAULT_METRIC, goals: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Group], str, str | None]:
    """Order configurations by a metric: ``by`` if any has it, else the first metric with a known direction.

    ``goals``: metric → direction, of a search. Return the configurations, the best first and labelled in that order,
    those without the metric last; the metric; and ``maximize`` or ``minimize``, or None if no direction is known."""
    by = by if any(by in group.figures for group in groups) else _first_by(metrics_of(groups), goals) or by
    direction = direction_of(by, goals)
    sign = 0.0 if direction is None else 1.0 if direction == MINIMIZE else -1.0  # 0: the order stays as it is

    def sort_key(group: Group) -> float:
        figure = group.figures.get(by)
        return sign * figure.finite.mean if figure is not None and figure.finite is not None else math.inf

    ranked = [replace(group, label=letters(number)) for number, group in enumerate(sorted(groups, key=sort_key))]
    return ranked, by, direction


def _first_by(names: Sequence[str], goals: Mapping[str, str]) -> str:
    """Return the first metric with a known direction, else the first metric; '' without any."""
    directed = (name for name in names if name not in SPEEDS and direction_of(name, goals) is not None)
    return next(directed, next(iter(names), ""))


def why_made(nearest: tuple[str, Sequence[Difference]] | None) -> list[str]:
    """Return lines about why a run was made: its differences from the nearest finished run (key, differences)."""
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

    def in_order(value: float | str | None) -> tuple[bool, float, str]:  # numbers by size, then names
        return (False, value, "") if isinstance(value, float) else (True, 0.0, value or "")

    configs = [flat_config(group.first) for group in groups]
    values = [[_axis_value(field_value(config, name)) for config in configs] for name in fields]
    choices = [sorted({*of_field}, key=in_order) for of_field in values]  # the values of rows and columns
    if not all(1 < len(of_field) <= _MOST_VALUES for of_field in choices):
        return None
    positions = [(choices[0].index(row), choices[1].index(column)) for row, column in zip(*values, strict=True)]
    # a grid with two groups in one cell, or with too many empty cells, shows less than a table
    too_few = len(positions) < _LEAST_SHARE * len(choices[0]) * len(choices[1])
    if too_few or len(set(positions)) < len(positions):
        return None
    statistics = [figure.finite if (figure := group.figures.get(by)) else None for group in groups]
    means = [item.mean for item in statistics if item is not None]
    cells = []
    for group, item, (row, column) in zip(groups, statistics, positions, strict=True):
        level, mean_text = None, "-"
        if item is not None:
            share = (item.mean - min(means)) / ((max(means) - min(means)) or 1.0)
            level = min(LEVELS - 1, int(LEVELS * (1 - share if direction == MINIMIZE else share)))
            mean_text = with_spread(item.mean, item.std, by)
        title = f"{group.label} {group.title}: {by} {mean_text}"
        cells.append(Cell(row=row, column=column, lines=(group.label, mean_text), level=level, title=title))
    names = short_field_names(fields)
    texts = [tuple(f"{value:.10g}" if isinstance(value, float) else value or "-" for value in side) for side in choices]
    about = (names[fields[0]], names[fields[1]], by)
    return Grid(rows=texts[0], columns=texts[1], cells=tuple(cells), about=about)


def _axis_value(value: Any) -> float | str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return None if value is None else shown(value)


# ------------------------------------------------------------------------------- Markdown and JSON
def time_text(unix_time: float) -> str:
    """Format in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_time))


def hosts(report: Report) -> list[dict[str, Any]]:
    """Return each host once: its facts, its number of runs, and its address and network if recorded."""
    host_by_name: dict[str, dict[str, Any]] = {}
    for run in report.runs:
        for name, facts in run.environments.items():
            recorded = {field: facts.get(field) or "" for field in _HOST_FACTS}
            host = host_by_name.setdefault(name, {"host": name, "runs": 0, "interface": "", **recorded})
            host["runs"] += 1
        for node in run.planned_nodes:
            env = node.get("env")
            networks = [str(env[name]).lstrip("=") for name in _NETWORKS if isinstance(env, Mapping) and name in env]
            if str(node.get("host")) in host_by_name:
                interface = " ".join(dict.fromkeys([str(node.get("address") or ""), *networks])).strip()
                host_by_name[str(node["host"])]["interface"] = interface
    return [*host_by_name.values()]


def verdict_text(verdict: Mapping[str, Any] | None) -> str:
    """Describe the result of `doit reproduce` in a few words."""
    if verdict is None:
        return "not made again yet"
    if verdict.get("reproduced"):
        return f"reproduced: {verdict.get('compared', 'weights_sha256')}, metrics and steps are equal"
    if verdict.get("within_spread"):
        return "on other hardware, its metrics within their spread"
    outcome = verdict.get("outcome")
    return f"not reproduced: {len(outcome) if isinstance(outcome, list) else 'some'} field(s) differ"


def markdown(report: Report) -> str:
    """Render the report without pictures."""
    intro = f"{tables.escaped(report.subject)}: {report.summary}; made {time_text(report.unix_time)}."
    lines = [f"# {tables.escaped(report.title)}", "", intro, "", tables.escaped(report.conclusion), ""]
    lines += [*fenced([hide(report.command)]), "", *(f"- {tables.escaped(line)}" for line in report.why)]
    lines += ["", tables.markdown(report.comparison)]
    if report.failures or report.absent:
        lines += ["", "## Not finished", ""]
        lines += [f"- `{run.key}` {run.state}: {tables.escaped(run.failure)}" for run in report.failures]
        lines += [f"- {tables.escaped(f'{one.key} {one.what} {one.state}: {one.why}')}" for one in report.absent]
    lines += ["", "## Provenance", "", "| run | commit | reproduced |", "| --- | --- | --- |"]
    for run in report.runs:
        commit = str(run.provenance.get("git_commit") or "-")[:10]
        dirty = " with changes" if run.provenance.get("git_dirty") else ""
        lines.append(tables.row((run.key, f"{commit}{dirty}", verdict_text(run.verdict))))
    lines += ["", *fenced([f"{run.command}  # {run.key}" for run in report.runs], "sh")]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as data, with the curves."""
    return {
        "title": report.title,
        "subject": report.subject,
        "conclusion": report.conclusion,
        "why": list(report.why),
        "command": report.command,
        "unix_time": report.unix_time,
        "by": report.by,
        "direction": report.direction,
        **tables.as_json(report.comparison),
        "curves": {
            name: {
                band.label: [
                    [point.x, tables.json_number(point.mean), tables.json_number(point.std), point.n]
                    for point in band.points
                ]
                for band in bands
            }
            for name, bands in report.bands.items()
        },
        "hosts": hosts(report),
        "absent": [asdict(one) for one in report.absent],
        "verdicts": {run.key: verdict_text(run.verdict) for run in report.runs},
    }
