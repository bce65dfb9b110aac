"""The table of `doit runs`: a heading with what all listed runs share, then a line for each run.

A line has the run's key, state, age, name, test accuracy (or a script's first metrics), training time, hosts, and the
fields in which it differs from the other runs, unless its name has them already.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pipeline.core.errors import without_place
from pipeline.core.printable import printable
from pipeline.core.tables import aligned, counted, cut, duration, file_size, padded
from pipeline.core.tables import columns as width_of
from pipeline.runs.contents import short_field_names
from pipeline.runs.index import RunRow
from pipeline.runs.result import first_metrics

STATE_AT = 14
"""The column at which the state begins in each line: behind a key of 12 characters."""
_NAME, _DIFFERS, _ACCURACY = "name", "differs", "accuracy"
_ORDER = (
    "key", "state", "when", "age", _NAME, "what", _ACCURACY, "metrics", "time", "size", "ranks", "hosts", _DIFFERS,
)  # fmt: skip
_FIRST = ("key", "state", "age", _NAME)  # in each line, also where a failure stands for the other columns
_FIRST_TO_GO = ("ranks", "hosts", "size", "time", "age")
_LEAST_NAME, _LEAST_DIFFERS = 14, 14  # columns that these keep, if they need them
_MOST_METRICS = 2  # of a script: a line has little room
_NAMES_WIDTH = 24  # characters; longer lists of hosts are a number


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run of the list.

    Attributes:
        name: its short name, as in MLflow; '' if its configuration wasn't read.
        marks: remarks that are never cut off.
        differing: the fields in which the listed runs differ, with this run's values.
    """

    row: RunRow
    name: str = ""
    marks: str = ""
    size_bytes: int | None = None
    differing: Mapping[str, Any] = field(default_factory=dict)


class Table(NamedTuple):
    """The lines, and the titles of the columns that had no room."""

    lines: list[str]
    left_out: list[str]


def table(runs: Sequence[ListedRun], *, width: int, now: float) -> Table:
    """Return a heading line, the titles and a line for each run (at least one), in at most ``width`` columns."""
    ranks, hosts = [run.row.nodes for run in runs], [_hosts(run.row) for run in runs]
    columns = _columns(
        runs,
        age=[age(now - run.row.unix_time, run.row.unix_time) for run in runs],
        name=[run.name or run.row.what for run in runs],
        hosts=hosts,
        differs=_differing(runs),
    )
    shared = [values[0] for values in ([run.row.what for run in runs], ranks, hosts) if len({*values}) == 1]
    for title, values in (("ranks", ranks), ("hosts", hosts)):
        if len({*values}) == 1:  # the heading has it
            columns.pop(title, None)
    heading = ": ".join(filter(None, (counted(len(runs), "run"), ", ".join(filter(None, shared)))))
    shown, left_out = _fitted(columns, [width_of(_remarks(run)) for run in runs], width)
    errors = [without_place(run.row.error) for run in runs]  # there is no room for hosts
    failures = [_joined(_remarks(run), error) if error else "" for run, error in zip(runs, errors, strict=True)]
    lines = _lines(shown, ["", *failures])
    return Table([cut(heading, width), *(cut(line, width) for line in lines)], left_out)


def wide_table(runs: Sequence[ListedRun]) -> Table:
    """Return all columns at their full widths, with dates instead of ages and the full names of fields."""
    columns = _columns(
        runs,
        when=[day(run.row.unix_time) for run in runs],
        name=[run.name for run in runs],
        what=[run.row.what for run in runs],
        hosts=[", ".join(run.row.hosts) for run in runs],
        differs=[_joined(_remarks(run), run.row.error, *_fields(run.differing, {})) for run in runs],
    )
    return Table(aligned(_rows(columns)).split("\n"), [])


def _columns(runs: Sequence[ListedRun], **own: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return title → cells of the columns that both tables have and of ``own``, in _ORDER, without empty columns.

    Without a script among the runs, the column of figures is called ``accuracy``. Otherwise it is called ``metrics``,
    and each figure has its name.
    """
    figures = [_figures(run.row) for run in runs]
    title = _ACCURACY if all(text.startswith(_ACCURACY) or not text for text in figures) else "metrics"
    columns: dict[str, Sequence[str]] = {
        "key": [run.row.key for run in runs],
        "state": [run.row.state for run in runs],
        title: [text.removeprefix(f"{_ACCURACY} ") for text in figures] if title == _ACCURACY else figures,
        "time": ["" if run.row.train_s is None else duration(run.row.train_s) for run in runs],
        "size": ["" if run.size_bytes is None else file_size(run.size_bytes) for run in runs],
        "ranks": [run.row.nodes for run in runs],  # such as ``2 + 2 ranks``
        **own,
    }
    return {title: columns[title] for title in _ORDER if any(columns.get(title, ()))}


def age(seconds: float, unix_time: float) -> str:
    """Return ``12 s``, ``5 min``, ``3 h``, ``2 d``; beyond 99 days the date."""
    for unit, length, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, 100)):
        if (count := int(max(seconds, 0) / length)) < most:
            return f"{count} {unit}"
    return day(unix_time).partition(" ")[0]


def day(unix_time: float) -> str:
    """Return ``2026-11-22 02:39``, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time))


def _lines(columns: Mapping[str, Sequence[str]], failures: Sequence[str]) -> list[str]:
    """Return the table's lines. A text of ``failures`` that isn't '' replaces the columns behind the name."""
    first = {title: columns[title] for title in columns if title in _FIRST}
    others = {title: columns[title] for title in columns if title not in _FIRST}
    starts = aligned(_rows(first)).split("\n")
    ends = aligned(_rows(others)).split("\n") if others else [""] * len(starts)
    width = max(map(width_of, starts))
    texts = [failure or end for failure, end in zip(failures, ends, strict=True)]
    return [f"{padded(start, width)}  {text}".rstrip() for start, text in zip(starts, texts, strict=True)]


def _rows(columns: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """Return the titles, then the cells of each run."""
    return [[*columns], *zip(*columns.values(), strict=True)]


def _fitted(
    columns: Mapping[str, Sequence[str]], remark_widths: Sequence[int], width: int
) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Fit the columns into ``width``: leave out those of _FIRST_TO_GO in order, then cut the names.

    Args:
        remark_widths: the width of each run's remarks, which begin its last cell and are not cut.

    Returns the columns, and the titles of those left out.
    """
    widths = {title: max(map(width_of, (title, *cells))) for title, cells in columns.items()}
    name, differs = widths.pop(_NAME, 0), widths.pop(_DIFFERS, 0)
    least = min(name, _LEAST_NAME) + min(differs, max(_LEAST_DIFFERS, *(remark + 1 for remark in remark_widths)))
    flexible = [title for title in (_NAME, _DIFFERS) if title in columns]
    left_out = []
    for title in (title for title in _FIRST_TO_GO if title in widths):
        if sum(widths.values()) + 2 * (len(widths) + len(flexible) - 1) + least <= width:
            break
        del widths[title]
        left_out.append(title)
    room = width - sum(widths.values()) - 2 * (len(widths) + len(flexible) - 1)
    name_width = max(min(name, _LEAST_NAME), min(name, max(room // 2, room - differs)))
    if differs and room - name_width < _LEAST_DIFFERS // 2 and not any(remark_widths):
        flexible.remove(_DIFFERS)
        left_out.append(_DIFFERS)
    return {
        title: [cut(cell, name_width) for cell in cells] if title == _NAME else cells
        for title, cells in columns.items()
        if title in widths or title in flexible
    }, left_out


def _figures(row: RunRow) -> str:
    """Return the test accuracy; of a script its first metrics."""
    accuracy = [] if row.accuracy is None or row.metrics else [f"{_ACCURACY} {row.accuracy:.4f}"]
    return ", ".join([*accuracy, *first_metrics(row.metrics, _MOST_METRICS)])


def _hosts(row: RunRow) -> str:
    names = ", ".join(row.hosts)
    return names if len(names) <= _NAMES_WIDTH else counted(len(row.hosts), "host")


def _differing(runs: Sequence[ListedRun]) -> list[str]:
    """Return for each run its remarks, then the fields in which the runs differ, without those that its name has."""
    short = short_field_names([*dict.fromkeys(name for run in runs for name in run.differing)])
    kinds = [run.row.what.split() for run in runs]  # data set, model and optimizer; or ``script`` and its file
    known = [kind for kind in kinds if len(kind) > 1 and not kind[0].startswith("(")]  # of runs with a configuration
    ours = [kind for kind in known if kind[0] != "script"]
    # Beside scripts, a run of the classifier is compared with the other runs of the classifier.
    compared = ours or known
    shared = {word for word in (compared[0] if compared else ()) if all(word in kind for kind in compared)}
    lines = []
    for run, kind in zip(runs, kinds, strict=True):
        in_name = {*run.name.split()} if run.name else {*kind}
        own_words = [word for word in kind if word not in shared | in_name | {"script"}] if kind in known else []
        own_words = [word for word in own_words if PurePosixPath(word).stem not in in_name]  # a script's name is a stem
        fields = [word for word in _fields(run.differing, short) if word not in in_name]
        lines.append(_joined(_remarks(run), *own_words, *fields))
    return lines


def _fields(differing: Mapping[str, Any], short: Mapping[str, str]) -> list[str]:
    """Return ``lr=0.1`` for each differing field; ``short`` maps fields to shorter names."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in differing.items()}
    return [f"{short.get(name, name)}={printable(text)}" for name, text in texts.items()]


def _remarks(run: ListedRun) -> str:
    row = run.row
    return _joined("SYNTHETIC DATA" if row.synthetic else "", row.note, row.nonfinite, run.marks)


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))
