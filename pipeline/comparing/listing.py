"""The table of `doit runs`: what all listed runs share stands once above it, then one line a run.

A line has the run's key, state, age, name, test accuracy (or a script's first metrics), training time, hosts, and the
fields in which it differs from the other runs and that its name doesn't say already.
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
from pipeline.core.tables import columns as columns_of
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
class Listed:
    """A run of the list.

    ``name`` is its short name, as MLflow has it ('': its configuration wasn't read); ``marks`` what has to be known of
    it, never cut; ``differing`` the fields in which the listed runs differ, with this run's values.
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


def table(listed: Sequence[Listed], *, width: int, now: float) -> Table:
    """Return a heading line, the titles and a line for each run (at least one), in at most ``width`` columns."""
    ranks, hosts = [one.row.nodes for one in listed], [_hosts(one.row) for one in listed]
    cells = _cells(
        listed,
        age=[age(now - one.row.unix_time, one.row.unix_time) for one in listed],
        name=[one.name or one.row.what for one in listed],
        hosts=hosts,
        differs=_differing(listed),
    )
    shared = [values[0] for values in ([one.row.what for one in listed], ranks, hosts) if len({*values}) == 1]
    for title, values in (("ranks", ranks), ("hosts", hosts)):
        if len({*values}) == 1:  # in the heading instead
            cells.pop(title, None)
    heading = ": ".join(filter(None, (counted(len(listed), "run"), ", ".join(filter(None, shared)))))
    shown, left_out = _fitted(cells, [columns_of(_marked(one)) for one in listed], width)
    errors = [without_place(one.row.error) for one in listed]  # hosts would have no room
    failures = [_joined(_marked(one), error) if error else "" for one, error in zip(listed, errors, strict=True)]
    lines = _lines(shown, ["", *failures])
    return Table([cut(heading, width), *(cut(line, width) for line in lines)], left_out)


def wide_table(listed: Sequence[Listed]) -> Table:
    """Return all columns at their full lengths, with dates for ages and the full names of fields."""
    cells = _cells(
        listed,
        when=[day(one.row.unix_time) for one in listed],
        name=[one.name for one in listed],
        what=[one.row.what for one in listed],
        hosts=[", ".join(one.row.hosts) for one in listed],
        differs=[_joined(_marked(one), one.row.error, *_fields(one.differing, {})) for one in listed],
    )
    return Table(aligned(_rows(cells)).split("\n"), [])


def _cells(listed: Sequence[Listed], **own: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return title → cells: the columns that both tables have and ``own``, in their order, without empty ones.

    The figures are called ``accuracy`` where no script is among the runs, else ``metrics``, each with its name.
    """
    figures = [_figures(one.row) for one in listed]
    title = _ACCURACY if all(text.startswith(_ACCURACY) or not text for text in figures) else "metrics"
    cells: dict[str, Sequence[str]] = {
        "key": [one.row.key for one in listed],
        "state": [one.row.state for one in listed],
        title: [text.removeprefix(f"{_ACCURACY} ") for text in figures] if title == _ACCURACY else figures,
        "time": ["" if one.row.train_s is None else duration(one.row.train_s) for one in listed],
        "size": ["" if one.size_bytes is None else file_size(one.size_bytes) for one in listed],
        "ranks": [one.row.nodes for one in listed],  # such as ``2 + 2 ranks``
        **own,
    }
    return {title: cells[title] for title in _ORDER if any(cells.get(title, ()))}


def age(seconds: float, unix_time: float) -> str:
    """Return ``12 s``, ``5 min``, ``3 h``, ``2 d``; beyond 99 days the date."""
    for unit, length, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, 100)):
        if (count := int(max(seconds, 0) / length)) < most:
            return f"{count} {unit}"
    return day(unix_time).partition(" ")[0]


def day(unix_time: float) -> str:
    """Return ``2026-11-22 02:39``, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time))


def _lines(cells: Mapping[str, Sequence[str]], failures: Sequence[str]) -> list[str]:
    """Return the table's lines; where one of ``failures`` isn't '', that text stands where the figures would."""
    first = {title: cells[title] for title in cells if title in _FIRST}
    rest = {title: cells[title] for title in cells if title not in _FIRST}
    starts = aligned(_rows(first)).split("\n")
    ends = aligned(_rows(rest)).split("\n") if rest else [""] * len(starts)
    width = max(map(columns_of, starts))
    texts = [failure or end for failure, end in zip(failures, ends, strict=True)]
    return [f"{padded(start, width)}  {text}".rstrip() for start, text in zip(starts, texts, strict=True)]


def _rows(cells: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """Return the titles, then the cells of each run."""
    return [[*cells], *zip(*cells.values(), strict=True)]


def _fitted(
    cells: Mapping[str, Sequence[str]], marks: Sequence[int], width: int
) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Fit the columns into ``width``: first those of _FIRST_TO_GO go, then the names are cut.

    ``cells``: title → the cells below it; ``marks``: of each run the width of its last cell that is not to be cut.
    """
    widths = {title: max(map(columns_of, (title, *values))) for title, values in cells.items()}
    name, differs = widths.pop(_NAME, 0), widths.pop(_DIFFERS, 0)
    least = min(name, _LEAST_NAME) + min(differs, max(_LEAST_DIFFERS, *(mark + 1 for mark in marks)))
    flexible = [title for title in (_NAME, _DIFFERS) if title in cells]
    left_out = []
    for title in (title for title in _FIRST_TO_GO if title in widths):
        if sum(widths.values()) + 2 * (len(widths) + len(flexible) - 1) + least <= width:
            break
        del widths[title]
        left_out.append(title)
    room = width - sum(widths.values()) - 2 * (len(widths) + len(flexible) - 1)
    names = max(min(name, _LEAST_NAME), min(name, max(room // 2, room - differs)))
    if differs and room - names < _LEAST_DIFFERS // 2 and not any(marks):
        flexible.remove(_DIFFERS)
        left_out.append(_DIFFERS)
    return {
        title: [cut(value, names) for value in values] if title == _NAME else values
        for title, values in cells.items()
        if title in widths or title in flexible
    }, left_out


def _figures(row: RunRow) -> str:
    """Return the test accuracy; of a script its first metrics."""
    accuracy = [] if row.accuracy is None or row.metrics else [f"{_ACCURACY} {row.accuracy:.4f}"]
    return ", ".join([*accuracy, *first_metrics(row.metrics, _MOST_METRICS)])


def _hosts(row: RunRow) -> str:
    names = ", ".join(row.hosts)
    return names if len(names) <= _NAMES_WIDTH else counted(len(row.hosts), "host")


def _differing(listed: Sequence[Listed]) -> list[str]:
    """Return for each run its marks, then the fields in which the runs differ, without what its name says already."""
    short = short_field_names([*dict.fromkeys(name for one in listed for name in one.differing)])
    kinds = [one.row.what.split() for one in listed]  # dataset, model and optimizer; or the word script and its file
    known = [kind for kind in kinds if len(kind) > 1 and not kind[0].startswith("(")]  # else it has no configuration
    scripts = any(kind[0] == "script" for kind in known)
    ours = [kind for kind in known if kind[0] != "script"]
    # Beside scripts, a run of the classifier is set apart by what differs from the classifier's other runs.
    alike = ours if scripts and ours else known
    shared = {word for word in (alike[0] if alike else ()) if all(word in kind for kind in alike)}
    lines = []
    for one, kind in zip(listed, kinds, strict=True):
        said = {*one.name.split()} if one.name else {*kind}
        # words of its own; the name of a script's run has the stem of its file
        apart = [word for word in kind if word not in shared | said and PurePosixPath(word).stem not in said]
        apart = apart if kind in known else []
        fields = [word for word in _fields(one.differing, short) if word not in said]
        lines.append(_joined(_marked(one), *(word for word in apart if word != "script"), *fields))
    return lines


def _fields(differing: Mapping[str, Any], short: Mapping[str, str]) -> list[str]:
    return [f"{short.get(name, name)}={_shown(value)}" for name, value in differing.items()]


def _shown(value: Any) -> str:
    return printable(value) if isinstance(value, str) else json.dumps(value)


def _marked(one: Listed) -> str:
    row = one.row
    return _joined("SYNTHETIC DATA" if row.synthetic else "", row.note, row.nonfinite, one.marks)


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))
