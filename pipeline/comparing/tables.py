"""Format a comparison as text, Markdown and data. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.comparing.differing import PARTS, Against, Comparison
from pipeline.comparing.groups import CONFIDENCE, Figure, Group, MeanDifference
from pipeline.core.tables import counted, fenced, first_of, in_width, unit_of, wrapped
from pipeline.sweep.results import number, with_spread

_MOST_LINES = 60  # diff lines shown in a terminal
RULE = (
    f"A difference is larger than the spread over seeds where Welch's {CONFIDENCE:.0%} interval of it leaves out 0; "
    "each by itself: of twenty, about one does so by chance."
)
_MOST_NAMED = 4  # configurations named in a sentence
_INDENT = "  "


# --------------------------------------------------------------------------------------------- figures
def cell(figure: Figure | None, n: int, name: str = "") -> str:
    """Format the metric ``name`` of a group of ``n`` finished runs, and say which values its mean leaves out."""
    if figure is None:
        return "-"
    odd = [f"{count} {name}" for count, name in ((figure.nan, "NaN"), (figure.infinite, "inf")) if count]
    if figure.over is None:
        return ", ".join(odd)
    notes = [f"n {figure.over.n}"] if figure.over.n != n else []
    said = f" ({', '.join([*notes, *odd])})" if notes or odd else ""
    return f"{with_spread(figure.over.mean, figure.over.std, name)}{said}"


def signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


# ------------------------------------------------------------------------------------------------ text
def text(comparison: Comparison, width: int) -> str:
    """Format for a terminal of ``width`` columns; tables with too many groups continue below."""
    runs = sum(len(group.runs) for group in comparison.groups)
    lines = [f"{counted(len(comparison.groups), 'configuration')}, {counted(runs, 'run')}"]
    lines += ["", *_metrics(comparison, width)]
    for against in comparison.against:
        lines += ["", *_differences(comparison.groups[0].label, against, width)]
    if any(larger(against) for against in comparison.against):
        lines += ["", *wrapped(RULE, width)]
    for group in comparison.groups:
        lines += ["", *_about(group, width)]
    for part in PARTS:
        if rows := comparison.parts.get(part):
            table = [(part, *(group.label for group in comparison.groups)), *((row.name, *row.values) for row in rows)]
            lines += ["", *in_width(table, width)]
    same = [part for part in PARTS if not comparison.parts.get(part)]
    same += [] if any(against.code for against in comparison.against) else ["code"]
    if len(comparison.groups) > 1 and same:
        lines += ["", *wrapped(f"the same in all: {', '.join(same)}", width)]
    for against in comparison.against:
        lines += _code(comparison.groups[0].label, against)
    return "\n".join(lines)


def _about(group: Group, width: int) -> Iterator[str]:
    """Yield the label and distinguishing settings of a group, then its runs with notes."""
    yield from wrapped(f"{group.label}  {group.title}", width)
    for run in group.runs:
        seed = "" if run.seed is None else f"seed {run.seed}"
        notes = [part for part in (seed, run.reservation, run.nonfinite, run.failure) if part]
        yield from wrapped(f"   {run.key}  {'; '.join(notes)}".rstrip(), width)


def _metrics(comparison: Comparison, width: int) -> list[str]:
    head = ("metric", *(f"{group.label} (n {group.n})" for group in comparison.groups))
    rows = [
        (name, *(cell(group.figures.get(name), group.n, name) for group in comparison.groups))
        for name in comparison.metrics
    ]
    if not rows:
        return ["no figures: none of these runs is finished"]
    return [*in_width([head, *rows], width), *wrapped("mean ± sample standard deviation over seeds", width)]


def _differences(first: str, against: Against, width: int) -> Iterator[str]:
    yield from wrapped(f"{against.label} against {first}: {claim(against)}", width)
    for item in larger(against):
        yield from wrapped(f"{_INDENT}{item.metric}  {interval(item)}", width)


def claim(against: Against) -> str:
    """State what may be claimed about the differences, in a sentence."""
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
    """State in a sentence or two which configuration is best by ``by``, and which can't be distinguished from it."""
    first, *others = comparison.groups
    figure = first.figures.get(by)
    if figure is None or figure.over is None:
        return "No figures." if first.n else "No figures: none of these runs is finished."
    n = f" (n {figure.over.n})" if figure.over.n > 1 or others else ""
    value = f"{by} {with_spread(figure.over.mean, figure.over.std, by)}{n}"
    doubt = f" ({first.reservation})" if first.reservation else ""
    if not others:
        return f"{value}{doubt}."
    if direction is None:
        why = f"it isn't known whether a larger {by} is better"
        return f"None is called the best: {why}. {first.label} has {value}{doubt}."
    near: list[str] = []
    worse: list[str] = []
    unknown: dict[str, list[str]] = {}
    for item in comparison.against:
        of_by = item.difference(by)
        if why := item.reservation or ("no figure" if of_by is None else of_by.unknown):
            unknown.setdefault(why, []).append(item.label)
        elif of_by is not None:
            (worse if of_by.is_larger else near).append(item.label)
    said = [f"{_named(near)} not distinguishable from it"] if near else []
    said += [f"{_named(worse)} worse by more than the spread over seeds"] if worse else []
    said += [f"nothing is claimed about {first_of(labels, _MOST_NAMED)}: {why}" for why, labels in unknown.items()]
    rest = "; ".join(said)
    rest = f" {rest[0].upper()}{rest[1:]}." if rest else ""
    return f"Best is {first.label} ({first.brief}): {value}{doubt}.{rest}"


def _named(labels: Sequence[str]) -> str:
    """Return ``B is``, ``B and C are`` or ``B, C, D and 3 more are``."""
    if len(labels) > _MOST_NAMED:
        return f"{first_of(labels, _MOST_NAMED)} are"
    return f"{' and '.join(filter(None, (', '.join(labels[:-1]), labels[-1])))} {'is' if len(labels) == 1 else 'are'}"


def larger(against: Against) -> list[MeanDifference]:
    """Return the differences that may be called larger than the spread."""
    return [] if against.reservation else [item for item in against.differences if item.is_larger]


def interval(item: MeanDifference) -> str:
    """Return ``+0.0121, from +0.0034 to +0.0208``."""
    least, unit = unit_of(item.metric, item.difference)
    ends = [] if item.low is None or item.high is None else [signed(end / least) for end in (item.low, item.high)]
    bounds = f", from {ends[0]} to {ends[1]}" if ends else ""
    return f"{signed(item.difference / least)}{bounds} {unit}".rstrip()


def _code(first: str, against: Against) -> list[str]:
    """Return the code differences; empty if the code is the same."""
    if not against.code:
        return []
    lines = ["", f"code, {first} → {against.label}"]
    lines += [f"{_INDENT}{item.path} {item.change}" for item in against.code]
    diff = [line for item in against.code for line in item.diff]
    more = len(diff) - _MOST_LINES
    return lines + diff[:_MOST_LINES] + ([f"… {more:,} more lines; --json has them all"] if more > 0 else [])


# -------------------------------------------------------------------------------------------- Markdown
def markdown(comparison: Comparison) -> str:
    """Return tables for a paper, a pull request or a note; the first has one line per configuration."""
    labels = [group.label for group in comparison.groups]
    figures = []
    for group in comparison.groups:
        cells = (cell(group.figures.get(name), group.n, name) for name in comparison.metrics)
        figures.append((f"{group.label} {group.title}", str(group.n), *cells))
    lines = [*_markdown_table(("configuration", "n", *comparison.metrics), figures), ""]
    lines += ["Mean ± sample standard deviation over seeds.", ""]
    for group in comparison.groups:
        doubt = f" ({escaped(group.reservation)})" if group.reservation else ""
        lines.append(f"- {group.label}: {', '.join(run.key for run in group.runs)}{doubt}")
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
        "differs": {part: [{"name": row.name, "values": list(row.values)} for row in rows]
                    for part, rows in comparison.parts.items()},
        "against_first": [
            {
                "configuration": against.label,
                "reservation": against.reservation,
                "code": [{"path": item.path, "change": item.change, "diff": list(item.diff)} for item in against.code],
                "metrics": [_difference(item, against) for item in against.differences],
            }
            for against in comparison.against
        ],
        "rule": RULE,
    }  # fmt: skip


def _group(group: Group) -> dict[str, Any]:
    about = {"label": group.label, "n": group.n, "reservation": group.reservation}
    about |= {"words": list(group.words), "what": group.first.what, "of": len(group.runs)}
    names = ("key", "state", "seed", "reservation", "failure", "nonfinite", "command")
    runs = []
    for run in group.runs:
        metrics = {name: json_number(value) for name, value in run.figures.items()}
        runs.append({**{name: getattr(run, name) for name in names}, "metrics": metrics})
    statistics = {}
    for name, figure in group.figures.items():
        mean, std, n = (None, None, 0) if (over := figure.over) is None else (over.mean, over.std, over.n)
        of_finite = {"mean": json_number(mean), "std": json_number(std), "n": n}
        statistics[name] = {**of_finite, "nan": figure.nan, "infinite": figure.infinite}
    return {**about, "runs": runs, "statistics": statistics}


def _difference(item: MeanDifference, against: Against) -> dict[str, Any]:
    return {
        "metric": item.metric,
        "difference": json_number(item.difference),
        "low": item.low,
        "high": item.high,
        "larger_than_spread": None if against.reservation or item.unknown else item.is_larger,
        "unknown": item.unknown,
    }


def json_number(value: float | None) -> float | str | None:
    """Return the number, or its text if JSON can't represent it."""
    return value if value is None or math.isfinite(value) else number(value)
