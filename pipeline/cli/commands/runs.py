"""`doit runs`: the table of runs, with the fields in which they differ.

Here is also the choice of runs by overrides (``RunFilter``), which `doit clean` and `compare` use too.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pipeline.cli.finished import other_hardware
from pipeline.cli.output import STATE_COLOURS, answer, note, say, wants_json, width
from pipeline.cli.session import Session, relative
from pipeline.config.overrides.words import for_hydra
from pipeline.core.errors import UsageError, suggestion, without_host_and_rank
from pipeline.core.printable import printable, printable_lines, takes_colours
from pipeline.core.redact import placeholders
from pipeline.core.tables import aligned, counted, cut, duration, file_size, padded
from pipeline.core.tables import columns as width_of
from pipeline.keys.content_key import flat
from pipeline.runs import index
from pipeline.runs.contents import ranks_of, short_field_names
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import RunRow, intact_parts
from pipeline.runs.lock import disk_usage
from pipeline.runs.result import first_metrics
from trainers.contract import run_folder

RUNS_DIR = "paths.runs"  # the field that says which folder to search for runs; it selects no runs within the folder
_NPROC = "nproc_per_node"

Config = Mapping[str, Any]
"""The content of a run's config.json, or of an altered one the part whose digest is right; {}: unknown."""


# ------------------------------------------------------------------------------------------- choosing runs
class RunFilter(NamedTuple):
    """The conditions that typed overrides set for runs: ``model=resnet18 seed=1``."""

    values: Mapping[str, Any]  # dotted field → value; model=resnet18 sets all fields of that option
    experiments: frozenset[str]  # the words experiment=NAME, which the command that started the run must have had

    def configs(self, runs_dir: Path, rows: Sequence[RunRow], *, in_part: bool) -> dict[str, Config]:
        """Return key → configuration of the runs that match; with ``in_part``, unknown fields of altered runs match."""
        configs = {}
        for row in rows:
            folder, is_altered = RunFolder(runs_dir / row.key), row.state == index.ALTERED
            if self.experiments and not self.experiments <= {*folder.overrides()}:
                continue
            config = intact_parts(folder).get("config", {}) if is_altered else self._config(folder)
            if self.matches(config, unknown_matches=in_part and is_altered):
                configs[row.key] = config
        return configs

    def _config(self, folder: RunFolder) -> Config:
        """Return config.json; if the filter has a number of ranks, with the run's actual number instead of ``auto``."""
        config: Config = folder.read_json(run_folder.CONFIG) or {}
        cluster = config.get("cluster")
        if not isinstance(cluster, Mapping) or not isinstance(self.values.get(f"cluster.{_NPROC}"), int):
            return config
        if cluster.get(_NPROC) != "auto":
            return config
        counts = {*ranks_of(folder.read_json(run_folder.KEY) or {}, folder.read_json(run_folder.PLAN) or {})}
        return {**config, "cluster": {**cluster, _NPROC: counts.pop()}} if len(counts) == 1 else config

    def matches(self, config: Config, *, unknown_matches: bool = False) -> bool:
        """Whether a configuration has all values."""
        sections = {name.partition(".")[0] for name in self.values}
        fields = dict(flat({name: config[name] for name in sections if name in config}))
        return all(fields[name] == value if name in fields else unknown_matches for name, value in self.values.items())


def filter_of(words: Sequence[str], resolved: Mapping[str, Any]) -> RunFilter:
    """Return the filter for the overrides ``words``; ``resolved`` is the configuration composed of them.

    Raises UsageError: a word about something that no run folder contains.
    """
    values: dict[str, Any] = {}
    experiments = frozenset(word for word in words if word.startswith("experiment="))
    for word in for_hydra([word for word in words if word not in experiments]):
        name = word.lstrip("+~").partition("=")[0]
        is_group = "." not in name and isinstance(resolved.get(name), Mapping)
        paths = [name]
        if is_group:  # model=resnet18 stands for the fields that it sets
            from pipeline.config.overrides.origins import identifying_fields  # imports Hydra, half a second

            paths = identifying_fields(name, words) or [name]
        for path in paths:
            try:
                value = functools.reduce(operator.getitem, path.split("."), resolved)
            except (LookupError, TypeError) as error:
                raise UsageError(
                    f"{word.lstrip('+')}: a run doesn't tell its {path}; choose by what that sets, such as model=…"
                ) from error
            values |= flat(value, path)
    for name in placeholders(values):
        raise UsageError(f"{name} is secret, which no file of a run tells; leave it out")
    return RunFilter({name: value for name, value in values.items() if name != RUNS_DIR}, experiments)


def in_state(rows: Sequence[RunRow], state: str | None) -> list[RunRow]:
    """Return the runs in this state; None: all. Raises UsageError: there is no such state."""
    if state is not None and state.upper() not in index.STATES:
        raise UsageError(f"state={state} is no state of a run; {suggestion(state.upper(), index.STATES)}")
    return [row for row in rows if state is None or row.state == state.upper()]


class Selection(NamedTuple):
    """The runs that match the overrides and the state, oldest first."""

    rows: list[RunRow]
    comparable: dict[str, Config]  # key → configuration for the column of differences; {} if it isn't compared


def selected(current: Session, state: str | None = None) -> Selection:
    """Return the matching runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    runs_dir, run_filter = current.config.runs_dir, filter_of(current.invocation.overrides, current.config.resolved)
    rows = in_state(index.rows(runs_dir), state)
    configs: dict[str, Config] = {row.key: {} for row in rows}
    if any(run_filter) or len(rows) <= _MAX_COMPARED:
        configs = run_filter.configs(runs_dir, rows, in_part=True)
    rows = [row for row in rows if row.key in configs]
    can_compare = len(rows) <= _MAX_COMPARED
    comparable = {row.key: configs[row.key] if can_compare and row.state != index.ALTERED else {} for row in rows}
    return Selection(rows, comparable)


# ------------------------------------------------------------------------------------------- the list
# the table shows these fields for every run
_IN_OTHER_COLUMNS = ("dataset.name", "model.name", "optimizer.name", "program.name", "program.script")
_NOT_COMPARED = ("cluster.", "paths.", "tracking.")  # these fields say where a run ran, not what it computed
_ENV = "cluster.env."  # the exception: environment variables of ranks are part of the key
_MAX_COMPARED = 1000  # with more runs the fields in which they differ aren't shown
_MAX_MEASURED = 200  # with more runs --wide shows no sizes: measuring a run takes a millisecond


def runs(current: Session) -> None:
    """List runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    order, as_json, is_wide = options.get("sort", "time"), wants_json(), current.invocation.is_on("wide")
    rows, comparable = selected(current, options.get("state"))
    # a size takes a walk through the run folder, so it is measured only if it will be shown
    measures = as_json or order == "size" or (is_wide and len(rows) <= _MAX_MEASURED)
    sizes_bytes = {row.key: disk_usage(runs_dir / row.key).bytes for row in rows} if measures else {}
    rows = _sort(rows, order, sizes_bytes)
    differing = differences(comparable, shortened=not (as_json or is_wide))
    if as_json:
        answer([{**asdict(row), "bytes": sizes_bytes[row.key], "differs": differing[row.key]} for row in rows])
    elif not index.has_runs(runs_dir):
        say(f"no runs under {relative(runs_dir)} yet; start one: doit train experiment=quickstart")
    elif not rows:
        say(f"no run under {relative(runs_dir)} matches these values")
    else:
        listed = [
            ListedRun(
                row=row,
                name=RunFolder(runs_dir / row.key).short_name(comparable[row.key]) if comparable[row.key] else "",
                marks="other hardware" if other_hardware({"hosts": row.hosts, "hardware": row.hardware}) else "",
                size_bytes=sizes_bytes.get(row.key),
                differing=differing[row.key],
            )
            for row in rows
        ]
        lines, left_out = wide_table(listed) if is_wide else table(listed, width=width(), now=time.time())
        printable = printable_lines("\n".join(lines)).split("\n")
        say("\n".join(_coloured(printable, [row.state for row in rows])), is_coloured=True)
        if left_out:
            note(f"no room here for {', '.join(left_out)}: doit runs --wide shows all, --json as JSON")


def _coloured(lines: Sequence[str], states: Sequence[str]) -> list[str]:
    """Colour the state in each of the last lines, which are those of the runs, if stdout takes colours."""
    if not takes_colours(sys.stdout, os.environ):
        return [*lines]
    at, head = STATE_AT, len(lines) - len(states)
    return [*lines[:head]] + [
        f"{line[:at]}\x1b[{STATE_COLOURS.get(state, '0')}m{state}\x1b[0m{line[at + len(state) :]}"
        if line[at:].startswith(state)
        else line
        for line, state in zip(lines[head:], states, strict=True)
    ]


def _sort(rows: Sequence[RunRow], order: str, sizes_bytes: Mapping[str, int]) -> list[RunRow]:
    """Sort the runs; the best, newest or largest comes last, above the next prompt."""
    if order == "size":
        return sorted(rows, key=lambda row: sizes_bytes[row.key])
    if order in ("accuracy", "train_s"):  # runs without the figure come first
        return sorted(rows, key=lambda row: -1.0 if getattr(row, order) is None else getattr(row, order))
    return sorted(rows, key=lambda row: row.unix_time if order == "time" else getattr(row, order))


def differences(configs: Mapping[str, Config], *, shortened: bool = False) -> dict[str, dict[str, Any]]:
    """Return key → the fields in which the runs differ, with this run's values.

    Without _IN_OTHER_COLUMNS and _NOT_COMPARED. A field is compared among the runs that have it; but a script's
    argument among all scripts, and an environment variable among all runs, because its absence is a difference too.
    ``shortened``: of a group whose option differs (dataset=digits, dataset=mnist) a field counts only if it differs
    within one option, as what follows from the option says no more than that.
    """
    fields_by_run = {key: dict(flat(config)) for key, config in configs.items()}  # key → dotted field → value
    names = {name for fields in fields_by_run.values() for name in fields if name not in _IN_OTHER_COLUMNS}
    scripts = [key for key, config in configs.items() if "program" in config]

    def compared_runs(name: str) -> list[str]:
        # for a script's argument and for a variable of the environment, absence is a difference too
        if name.startswith("program."):
            return scripts
        if name.startswith(_ENV):
            return [key for key, fields in fields_by_run.items() if fields]
        return [key for key, fields in fields_by_run.items() if name in fields]

    def is_shown(name: str, fields: Mapping[str, Any]) -> bool:
        return name in fields and not (name.startswith("program.") and fields[name] in (None, "", [], {}))

    def differs(name: str) -> bool:
        option = f"{name.partition('.')[0]}.name"
        values_by_option: dict[str, set[str]] = {}
        for key in compared_runs(name):
            chosen = "" if name == option or not shortened else repr(fields_by_run[key].get(option))
            values_by_option.setdefault(chosen, set()).add(repr(fields_by_run[key].get(name)))
        return any(len(values) > 1 for values in values_by_option.values())

    compared = sorted(name for name in names if name.startswith(_ENV) or not name.startswith(_NOT_COMPARED))
    differing = [name for name in compared if differs(name)]
    return {
        key: {name: fields[name] for name in differing if is_shown(name, fields)}
        for key, fields in fields_by_run.items()
    }


# ------------------------------------------------------------------------------------------- the table
STATE_AT = 14  # the column at which the state begins in each line: behind a key of 12 characters
_NAME, _DIFFERS, _ACCURACY = "name", "differs", "accuracy"
_ORDER = (
    "key", "state", "when", "age", _NAME, "what", _ACCURACY, "metrics", "time", "size", "ranks", "hosts", _DIFFERS,
)  # fmt: skip
_LEFT_COLUMNS = ("key", "state", "age", _NAME)  # in each line; in that of a failed run, its error replaces the others
_DROPPED_IN_ORDER = ("ranks", "hosts", "size", "time", "age")  # columns left out one by one if the terminal is narrow
_MIN_NAME, _MIN_DIFFERS = 14, 14  # the widths that these columns keep if their content needs them
_MAX_METRICS = 2  # metrics of a script that are shown
_MAX_ERROR = 160  # columns of an error, also where no terminal limits a line
_HOSTS_WIDTH = 24  # characters; of a longer list of hosts only the number is shown


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run of the list."""

    row: RunRow
    name: str = ""  # its short name, as in MLflow; '' if its configuration wasn't read
    marks: str = ""  # remarks that are never cut off
    size_bytes: int | None = None
    # the fields in which the listed runs differ, with this run's values
    differing: Mapping[str, Any] = field(default_factory=dict)


Table = tuple[list[str], list[str]]  # the lines, and the titles of the columns that had no room


def table(runs: Sequence[ListedRun], *, width: int, now: float) -> Table:
    """Return a heading line, the titles and a line for each run (at least one), in at most ``width`` columns."""
    ranks, hosts = [run.row.nodes for run in runs], [_hosts(run.row) for run in runs]
    columns = _columns(
        runs,
        age=[age(now - run.row.unix_time, run.row.unix_time) for run in runs],
        name=[run.name or run.row.what for run in runs],
        hosts=hosts,
        differs=_difference_cells(runs),
    )
    # what all listed runs share is in the heading, and needs no column
    shared = [values[0] for values in ([run.row.what for run in runs], ranks, hosts) if len({*values}) == 1]
    for title, values in (("ranks", ranks), ("hosts", hosts)):
        if len({*values}) == 1:
            columns.pop(title, None)
    heading = ": ".join(filter(None, (counted(len(runs), "run"), ", ".join(filter(None, shared)))))
    shown, left_out = _fit(columns, [width_of(_remarks(run)) for run in runs], width)
    errors = [cut(without_host_and_rank(run.row.error), _MAX_ERROR) for run in runs]  # hosts take room
    failures = [_join(_remarks(run), error) if error else "" for run, error in zip(runs, errors, strict=True)]
    lines = _lines(shown, ["", *failures])
    return [cut(heading, width), *(cut(line, width) for line in lines)], left_out


def wide_table(runs: Sequence[ListedRun]) -> Table:
    """Return all columns at their full widths, with dates instead of ages and the full names of fields."""
    columns = _columns(
        runs,
        when=[day(run.row.unix_time) for run in runs],
        name=[run.name for run in runs],
        what=[run.row.what for run in runs],
        hosts=[", ".join(run.row.hosts) for run in runs],
        differs=[_join(_remarks(run), run.row.error, *_fields(run.differing, {})) for run in runs],
    )
    return aligned(_rows(columns)).split("\n"), []


def _columns(runs: Sequence[ListedRun], **own: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return title → cells of the columns that both tables have and of ``own``, in _ORDER, without empty columns."""
    # the figures are accuracies, or metrics, each with its name, if a script is among the runs
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
    for unit, length_s, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, 100)):
        if (count := int(max(seconds, 0) / length_s)) < limit:
            return f"{count} {unit}"
    return day(unix_time).partition(" ")[0]


def day(unix_time: float) -> str:
    """Return ``2026-11-22 02:39``, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time))


def _lines(columns: Mapping[str, Sequence[str]], failures: Sequence[str]) -> list[str]:
    """Return the table's lines. ``failures``: per line '', or the text that replaces the columns after the name."""
    left = {title: columns[title] for title in columns if title in _LEFT_COLUMNS}
    others = {title: columns[title] for title in columns if title not in _LEFT_COLUMNS}
    starts = aligned(_rows(left)).split("\n")
    ends = aligned(_rows(others)).split("\n") if others else [""] * len(starts)
    width = max(map(width_of, starts))
    texts = [failure or end for failure, end in zip(failures, ends, strict=True)]
    return [f"{padded(start, width)}  {text}".rstrip() for start, text in zip(starts, texts, strict=True)]


def _rows(columns: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    return [[*columns], *zip(*columns.values(), strict=True)]


def _fit(
    columns: Mapping[str, Sequence[str]], remark_widths: Sequence[int], width: int
) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Fit the columns into ``width``: leave out those of _DROPPED_IN_ORDER, then cut the names.

    Returns the columns, and the titles of those left out. ``remark_widths``: the width of each run's remarks, which
    begin its last cell and are not cut.
    """
    widths = {title: max(map(width_of, (title, *cells))) for title, cells in columns.items()}
    name, differs = widths.pop(_NAME, 0), widths.pop(_DIFFERS, 0)
    # name and differs can shrink to these widths; all columns are two blanks apart
    least = min(name, _MIN_NAME) + min(differs, max(_MIN_DIFFERS, *(remark + 1 for remark in remark_widths)))
    flexible = [title for title in (_NAME, _DIFFERS) if title in columns]
    left_out = []
    for title in (title for title in _DROPPED_IN_ORDER if title in widths):
        if sum(widths.values()) + 2 * (len(widths) + len(flexible) - 1) + least <= width:
            break
        del widths[title]
        left_out.append(title)
    # the name gets half of the rest, or more if differs needs less
    room = width - sum(widths.values()) - 2 * (len(widths) + len(flexible) - 1)
    name_width = max(min(name, _MIN_NAME), min(name, max(room // 2, room - differs)))
    if differs and room - name_width < _MIN_DIFFERS // 2 and not any(remark_widths):
        flexible.remove(_DIFFERS)
        left_out.append(_DIFFERS)
    return {
        title: [cut(cell, name_width) for cell in cells] if title == _NAME else cells
        for title, cells in columns.items()
        if title in widths or title in flexible
    }, left_out


def _figures(row: RunRow) -> str:
    accuracy = [] if row.accuracy is None or row.metrics else [f"{_ACCURACY} {row.accuracy:.4f}"]
    return ", ".join([*accuracy, *first_metrics(row.metrics, _MAX_METRICS)])


def _hosts(row: RunRow) -> str:
    names = ", ".join(row.hosts)
    return names if len(names) <= _HOSTS_WIDTH else counted(len(row.hosts), "host")


def _difference_cells(runs: Sequence[ListedRun]) -> list[str]:
    """Return the cell "differs" of each run: its remarks, then its differences from the others that its name lacks."""
    # these are in its description (data set, model and optimizer, or a script's file) and in its fields
    short_names = short_field_names([*dict.fromkeys(name for run in runs for name in run.differing)])
    descriptions = [run.row.what.split() for run in runs]
    readable = [words for words in descriptions if len(words) > 1 and not words[0].startswith("(")]  # no "(unknown)"
    # if there are scripts too, runs of the built-in trainer are compared with each other alone
    compared = [words for words in readable if words[0] != "script"] or readable
    shared = {word for word in (compared[0] if compared else ()) if all(word in words for words in compared)}
    lines = []
    for run, words in zip(runs, descriptions, strict=True):
        in_name = {*run.name.split()} if run.name else {*words}
        own_words = [word for word in words if word not in shared | in_name | {"script"}] if words in readable else []
        own_words = [word for word in own_words if PurePosixPath(word).stem not in in_name]  # its name omits .py
        fields = [word for word in _fields(run.differing, short_names) if word not in in_name]
        lines.append(_join(_remarks(run), *own_words, *fields))
    return lines


def _fields(differing: Mapping[str, Any], short: Mapping[str, str]) -> list[str]:
    """Return ``lr=0.1`` for each differing field; ``short`` maps fields to shorter names."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in differing.items()}
    return [f"{short.get(name, name)}={printable(text)}" for name, text in texts.items()]


def _remarks(run: ListedRun) -> str:
    row = run.row
    return _join("SYNTHETIC DATA" if row.synthetic else "", row.note, row.nonfinite, run.marks)


def _join(*parts: str) -> str:
    return "  ".join(filter(None, parts))
