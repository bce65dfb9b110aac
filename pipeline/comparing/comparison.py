"""The comparison of groups of runs (`doit compare`): metrics, configuration, data, environment, hosts and code.

A group has the runs that differ only in the seed; each is compared with the first. Also: text, Markdown and JSON."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.comparing.groups import (
    CONFIDENCE,
    ComparedRun,
    Group,
    MeanDifference,
    MetricSummary,
    differing_fields,
    field_value,
    flat_config,
    mean_difference,
    metrics_of,
    shown,
)
from pipeline.core.files import sha256_bytes
from pipeline.core.redact import hide
from pipeline.core.tables import counted, fenced, file_size, first_of, in_width, unit_of, wrapped
from pipeline.keys.content_key import flat
from pipeline.runs.folder import leads_out
from pipeline.sweep.results import number, with_spread
from trainers.contract import run_folder

PARTS = ("configuration", "data", "environment", "topology", "hosts")
_HOST_FACTS = ("cpus", "cpu_model", "gpus", "gpu_models", "gpu_driver", "torch", "python")
_DIGEST = 12  # characters shown


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """A field, and the field's value in each group as text."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A code file that was ``added``, ``removed`` or ``changed``; ``diff`` holds the lines of a unified diff."""

    path: str
    change: str
    diff: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AgainstFirst:
    """How a group compares with the first one."""

    label: str
    code: tuple[FileChange, ...]  # the differing files
    differences: tuple[MeanDifference, ...]  # one for each metric of both groups
    reservation: str = ""  # why nothing may be claimed about the differences, or ''

    def difference(self, metric: str) -> MeanDifference | None:
        return next((one for one in self.differences if one.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of groups of runs. ``against``: of the further groups; ``parts``: part → differing fields."""

    groups: tuple[Group, ...]
    metrics: tuple[str, ...]
    against: tuple[AgainstFirst, ...]
    parts: Mapping[str, tuple[FieldRow, ...]] = field(default_factory=dict)


def compare(groups: Sequence[Group], wanted: Sequence[str] = ()) -> Comparison:
    """Compare every group with the first; ``wanted`` selects metrics (empty: all). Reads code snapshots."""
    firsts = [group.first for group in groups]  # configuration and code are the same in all runs of a group
    fields = differing_fields(firsts)
    data = [str(run.parts.get("data") or "")[:_DIGEST] for run in firsts]
    recorded = {name: [run.parts.get(name) for run in firsts] for name in ("environment", "topology")}
    parts = {
        "configuration": _rows(fields, [flat_config(run) for run in firsts]),
        "data": _differing([{"digest": digest} if digest else {} for digest in data]),
        **{
            name: _differing([dict(flat(one)) if isinstance(one, Mapping) and one else {} for one in values])
            for name, values in recorded.items()
        },
        "hosts": _differing([_hosts(group) for group in groups]),
    }
    metrics = tuple(name for name in metrics_of(groups) if not wanted or name in wanted)
    against = tuple(_against(groups[0], group, metrics) for group in groups[1:])
    return Comparison(groups=tuple(groups), metrics=metrics, against=against, parts=parts)


def _against(first: Group, group: Group, metrics: Sequence[str]) -> AgainstFirst:
    compared = []
    for name in metrics:
        one, two = first.figures.get(name), group.figures.get(name)
        if one is not None and two is not None and one.finite is not None and two.finite is not None:
            compared.append(mean_difference(name, one.finite, two.finite))
    doubts = "; ".join(f"{item.label}: {item.reservation}" for item in (first, group) if item.reservation)
    code = code_changes(first.first, group.first)
    return AgainstFirst(label=group.label, code=code, differences=tuple(compared), reservation=doubts)


# ---------------------------------------------------------------------------------------------- parts
def _hosts(group: Group) -> dict[str, Any]:
    """Return fact → its values on the hosts of a group's runs, as text with each value once."""
    facts_by_name: dict[str, dict[str, None]] = {}  # the inner dictionaries are sets in the order of the runs
    for run in group.runs:
        if run.hosts:
            facts_by_name.setdefault("names", {})[", ".join(run.hosts)] = None
        for facts in run.environments.values():
            for name in _HOST_FACTS:
                if facts.get(name) not in (None, "", []):
                    facts_by_name.setdefault(name, {})[hide(shown(facts[name]))] = None
        if run.provenance.get("git_commit"):
            dirty = " with changes" if run.provenance.get("git_dirty") else ""
            facts_by_name.setdefault("commit", {})[f"{str(run.provenance['git_commit'])[:10]}{dirty}"] = None
    return {name: "; ".join(values) for name, values in facts_by_name.items()}


def _differing(fields_of_groups: Sequence[Mapping[str, Any]]) -> tuple[FieldRow, ...]:
    """Return a row for each field that differs between groups; a group without any field doesn't count."""
    known = [fields for fields in fields_of_groups if fields]
    names = sorted({name for fields in known for name in fields})
    differing = [name for name in names if len({repr(fields.get(name)) for fields in known}) > 1]
    return _rows(differing, fields_of_groups)


def _rows(names: Sequence[str], fields_of_groups: Sequence[Mapping[str, Any]]) -> tuple[FieldRow, ...]:
    """Return a row for each field; '?' for a group whose fields are unknown, because its run folders were altered."""
    rows = []
    for name in names:
        values = tuple(shown(field_value(fields, name)) if fields else "?" for fields in fields_of_groups)
        rows.append(FieldRow(name=name, values=values))
    return tuple(rows)


# ----------------------------------------------------------------------------------------------- code
def code_changes(first: ComparedRun, second: ComparedRun) -> tuple[FileChange, ...]:
    """Return the code files that differ between two runs' snapshots; empty if a run's code is unknown."""
    if "code" not in first.parts or "code" not in second.parts:
        return ()
    before, after = (code if isinstance(code := run.parts["code"], Mapping) else {} for run in (first, second))
    same_key_version = first.parts.get("version") == second.parts.get("version")
    changes = []
    for path in sorted(before.keys() | after.keys()):
        if same_key_version and before.get(path) == after.get(path):
            continue
        old, new = _lines(first, path, before), _lines(second, path, after)
        # digests of two key versions always differ: then the files themselves are compared
        if old != new or same_key_version:
            change = "added" if path not in before else "removed" if path not in after else "changed"
            diff = difflib.unified_diff(old, new, f"{first.key}/{path}", f"{second.key}/{path}", lineterm="")
            changes.append(FileChange(path=path, change=change, diff=tuple(diff)))
    return tuple(changes)


def _lines(run: ComparedRun, path: str, code: Mapping[str, Any]) -> list[str]:
    """Return the lines of a file of the run's snapshot; for a binary file, one line with its size and digest. Empty if
    the run has no such file. ``code``: path → digest of the run's code."""
    snapshot = run.folder / run_folder.CODE / path
    if path not in code or leads_out(snapshot, run.folder):  # an altered key.json may contain any path
        return []
    try:
        content = snapshot.read_bytes()
        if b"\0" in content:
            return [f"(no text: {file_size(len(content))}, sha256 {sha256_bytes(content)[:12]})"]
        return [hide(line) for line in content.decode(errors="replace").splitlines()]
    except OSError:
        return ["(the run's folder has this file no more)"]


# ------------------------------------------------------------------------------------ figures and text
_MOST_LINES = 60  # diff lines shown in a terminal
RULE = (
    f"A difference is larger than the spread over seeds where Welch's {CONFIDENCE:.0%} interval of it leaves out 0; "
    "each is tested by itself: where nothing differs, about one in twenty does so by chance."
)
_MOST_NAMED = 4  # configurations named in a sentence
_INDENT = "  "


def cell(figure: MetricSummary | None, n: int, name: str = "") -> str:
    """Format the metric ``name`` of a group with ``n`` finished runs; note which values the mean leaves out."""
    if figure is None:
        return "-"
    left_out = [f"{count} {kind}" for count, kind in ((figure.nan, "NaN"), (figure.infinite, "inf")) if count]
    if figure.finite is None:
        return ", ".join(left_out)
    notes = [*([f"n {figure.finite.n}"] if figure.finite.n != n else []), *left_out]
    in_brackets = f" ({', '.join(notes)})" if notes else ""
    return f"{with_spread(figure.finite.mean, figure.finite.std, name)}{in_brackets}"


def signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def text(comparison: Comparison, width: int) -> str:
    """Format for a terminal of ``width`` columns; tables with too many groups continue below."""
    runs = sum(len(group.runs) for group in comparison.groups)
    lines = [f"{counted(len(comparison.groups), 'configuration')}, {counted(runs, 'run')}"]
    # runs with equal results count once: see ComparedRun.alike
    if alike := sum(len(run.alike) for group in comparison.groups for run in group.runs):
        came, counts = ("came out as another one", "counts") if alike == 1 else ("came out as others", "count")
        lines += wrapped(f"{counted(alike, 'more run')} {came} of them and {counts} once", width)
    lines += ["", *_metrics(comparison, width)]
    for against in comparison.against:
        lines += ["", *wrapped(f"{against.label} against {comparison.groups[0].label}: {claim(against)}", width)]
        for item in larger(against):
            lines += wrapped(f"{_INDENT}{item.metric}  {interval(item)}", width)
    if any(larger(against) for against in comparison.against):
        lines += ["", *wrapped(RULE, width)]
    for group in comparison.groups:
        lines += ["", *wrapped(f"{group.label}  {group.title}", width)]
        for run in group.runs:
            seed = "" if run.seed is None else f"seed {run.seed}"
            notes = "; ".join(filter(None, (seed, run.repeated, run.reservation, run.nonfinite, run.failure)))
            lines += wrapped(f"   {run.key}  {notes}".rstrip(), width)
    for part in PARTS:
        if rows := comparison.parts.get(part):
            table = [(part, *(group.label for group in comparison.groups)), *((row.name, *row.values) for row in rows)]
            lines += ["", *in_width(table, width)]
    same = [part for part in PARTS if not comparison.parts.get(part)]
    same += [] if any(against.code for against in comparison.against) else ["code"]
    if len(comparison.groups) > 1 and same:
        lines += ["", *wrapped(f"the same in all: {', '.join(same)}", width)]
    for against in comparison.against:
        lines += ["", f"code, {comparison.groups[0].label} → {against.label}"] if against.code else []
        lines += [f"{_INDENT}{item.path} {item.change}" for item in against.code]
        diff = [line for item in against.code for line in item.diff]
        lines += diff[:_MOST_LINES]
        lines += [f"… {len(diff) - _MOST_LINES:,} more lines; --json has them all"] if len(diff) > _MOST_LINES else []
    return "\n".join(lines)


def _metrics(comparison: Comparison, width: int) -> list[str]:
    head = ("metric", *(f"{group.label} (n {group.n})" for group in comparison.groups))
    rows = [
        (name, *(cell(group.figures.get(name), group.n, name) for group in comparison.groups))
        for name in comparison.metrics
    ]
    if not rows:
        return ["no figures: none of these runs is finished"]
    return [*in_width([head, *rows], width), *wrapped("mean ± sample standard deviation over seeds", width)]


def claim(against: AgainstFirst) -> str:
    """Return a sentence: how many differences are larger than the spread over seeds, or why nothing is claimed."""
    if against.reservation:
        return f"nothing is claimed ({against.reservation})"
    if not against.differences:
        return "nothing is claimed: no figure in common"
    n_larger = len(larger(against))
    unknown = [item for item in against.differences if item.unknown]
    if len(unknown) == len(against.differences):
        return f"nothing is claimed: {unknown[0].unknown}"
    inside = len(against.differences) - n_larger - len(unknown)
    rest = f"; {inside} within it" + (f", {len(unknown)} without a known spread" if unknown else "")
    return f"{n_larger or 'none'} of {len(against.differences)} differences larger than the spread over seeds{rest}"


def conclusion(comparison: Comparison, by: str, direction: str | None) -> str:
    """Return sentences: which configuration is best by the metric ``by``, and which can't be distinguished from it.
    ``direction``: ``maximize`` or ``minimize``; None if it isn't known which is better."""
    first, *others = comparison.groups
    figure = first.figures.get(by)
    if figure is None or figure.finite is None:
        return "No figures." if first.n else "No figures: none of these runs is finished."
    n = f" (n {figure.finite.n})" if figure.finite.n > 1 or others else ""
    value = f"{by} {with_spread(figure.finite.mean, figure.finite.std, by)}{n}"
    doubt = f" ({first.reservation})" if first.reservation else ""
    if not others:
        return f"{value}{doubt}."
    if direction is None:
        why = f"it isn't known whether a larger {by} is better"
        return f"None is called the best: {why}. {first.label} has {value}{doubt}."
    # the labels of the other configurations, by what may be said about them
    near: list[str] = []
    worse: list[str] = []
    unknown: dict[str, list[str]] = {}  # by the reason
    for item in comparison.against:
        of_by = item.difference(by)
        if why := item.reservation or ("no figure" if of_by is None else of_by.unknown):
            unknown.setdefault(why, []).append(item.label)
        elif of_by is not None:
            (worse if of_by.is_larger else near).append(item.label)
    clauses = [f"{_named(near)} not distinguishable from it"] if near else []
    clauses += [f"{_named(worse)} worse by more than the spread over seeds"] if worse else []
    clauses += [f"nothing is claimed about {first_of(labels, _MOST_NAMED)}: {why}" for why, labels in unknown.items()]
    rest = "; ".join(clauses)
    rest = f" {rest[0].upper()}{rest[1:]}." if rest else ""
    return f"Best is {first.label} ({first.brief}): {value}{doubt}.{rest}"


def _named(labels: Sequence[str]) -> str:
    """Return ``B is`` or ``B, C and D are``."""
    if len(labels) > _MOST_NAMED:
        return f"{first_of(labels, _MOST_NAMED)} are"
    return f"{' and '.join(filter(None, (', '.join(labels[:-1]), labels[-1])))} {'is' if len(labels) == 1 else 'are'}"


def larger(against: AgainstFirst) -> list[MeanDifference]:
    """Return the differences that may be called larger than the spread over seeds."""
    return [] if against.reservation else [item for item in against.differences if item.is_larger]


def interval(item: MeanDifference) -> str:
    """Format a difference and its interval: ``+0.0121, from +0.0034 to +0.0208``."""
    least, unit = unit_of(item.metric, item.difference)
    ends = [] if item.low is None or item.high is None else [signed(end / least) for end in (item.low, item.high)]
    bounds = f", from {ends[0]} to {ends[1]}" if ends else ""
    return f"{signed(item.difference / least)}{bounds} {unit}".rstrip()


# -------------------------------------------------------------------------------------------- Markdown
def markdown(comparison: Comparison) -> str:
    """Return tables for a paper, a pull request or a note; the first table has one line per configuration."""
    labels = [group.label for group in comparison.groups]
    head, *figures = by_configuration(comparison, comparison.metrics)
    lines = [*_markdown_table(head, figures), ""]
    lines += ["Mean ± sample standard deviation over seeds.", ""]
    for group in comparison.groups:
        doubt = f" ({escaped(group.reservation)})" if group.reservation else ""
        keys = (f"{run.key} ({run.repeated})" if run.repeated else run.key for run in group.runs)
        lines.append(f"- {group.label}: {', '.join(keys)}{doubt}")
    for part in PARTS:
        if rows := comparison.parts.get(part):
            lines += ["", *_markdown_table((part, *labels), [(row.name, *row.values) for row in rows])]
    for against in comparison.against:
        lines += ["", escaped(f"{against.label} against {labels[0]}: {claim(against)}.")]
        lines += [""] if larger(against) else []
        lines += [f"- {escaped(item.metric)}: {interval(item)}" for item in larger(against)]
        diff = [line for item in against.code for line in item.diff]
        lines += ["", *fenced(diff, "diff")] if diff else []
    lines += ["", RULE] if comparison.against else []
    return "\n".join(lines)


def by_configuration(comparison: Comparison, metrics: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the titles and the cells of a table with a line for each configuration."""
    figures = [("configuration", "n", *metrics)]
    for group in comparison.groups:
        cells = (cell(group.figures.get(name), group.n, name) for name in metrics)
        figures.append((f"{group.label} {group.title}", str(group.n), *cells))
    return figures


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [row(head), "| --- |" + " ---: |" * (len(head) - 1), *map(row, rows)]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(cell: str) -> str:
    """Escape characters that would end a cell or be parsed as a tag, markup or formula."""
    for mark in "\\|`*_[]~$^":
        cell = cell.replace(mark, f"\\{mark}")
    return " ".join(cell.replace("&", "&amp;").replace("<", "&lt;").split())


# ------------------------------------------------------------------------------------------------ JSON
def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as data; NaN and infinite values are the texts "NaN", "inf" and "-inf"."""
    return {
        "configurations": [_group(group) for group in comparison.groups],
        "differs": {part: [asdict(row) for row in rows] for part, rows in comparison.parts.items()},
        "against_first": [
            {
                "configuration": against.label,
                "reservation": against.reservation,
                "code": [asdict(item) for item in against.code],
                "metrics": [
                    {
                        **asdict(item),
                        "difference": json_number(item.difference),
                        "larger_than_spread": None if against.reservation or item.unknown else item.is_larger,
                    }
                    for item in against.differences
                ],
            }
            for against in comparison.against
        ],
        "rule": RULE,
    }  # fmt: skip


def _group(group: Group) -> dict[str, Any]:
    about = {"label": group.label, "n": group.n, "reservation": group.reservation}
    about |= {"words": list(group.words), "what": group.first.what, "of": len(group.runs)}
    names = ("key", "state", "seed", "reservation", "failure", "nonfinite", "command", "alike")
    runs = []
    for run in group.runs:
        metrics = {name: json_number(value) for name, value in run.figures.items()}
        runs.append({**{name: getattr(run, name) for name in names}, "metrics": metrics})
    statistics = {}
    for name, figure in group.figures.items():
        mean, std, n = (None, None, 0) if (over := figure.finite) is None else (over.mean, over.std, over.n)
        of_finite = {"mean": json_number(mean), "std": json_number(std), "n": n}
        statistics[name] = {**of_finite, "nan": figure.nan, "infinite": figure.infinite}
    return {**about, "runs": runs, "statistics": statistics}


def json_number(value: float | None) -> float | str | None:
    """Return the number, or its text if JSON can't represent it."""
    return value if value is None or math.isfinite(value) else number(value)
