"""`doit runs`: list all runs, or the runs that match given overrides, and the fields in which they differ."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cli.finished import other_hardware
from pipeline.cli.output import STATE_INKS, answer, note, say, wants_json, width
from pipeline.cli.session import Session, relative
from pipeline.comparing.listing import STATE_AT, ListedRun, table, wide_table
from pipeline.config.overrides.origins import stands_for
from pipeline.config.overrides.words import for_hydra
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.printable import printable_lines, takes_colours
from pipeline.core.redact import placeholders
from pipeline.keys.content_key import flat
from pipeline.runs import index
from pipeline.runs.contents import ranks_of
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import RunRow, intact_parts
from pipeline.runs.lock import measured
from trainers.contract import run_folder

RUNS_DIR = "paths.runs"
"""The field that says which folder to search for runs; it selects no runs within the folder."""
_NPROC = "nproc_per_node"

Config = Mapping[str, Any]
"""The content of a run's config.json, or the certain part of it; {}: unknown."""


# ------------------------------------------------------------------------------------------- choosing runs
class RunFilter(NamedTuple):
    """The values that a run must have to be chosen by overrides."""

    values: Mapping[str, Any]  # by dotted field; an option of a group stands for all fields that it sets
    experiments: frozenset[str]  # words experiment=NAME: config.json lacks them, a run's overrides don't

    def configs(self, runs_dir: Path, rows: Sequence[RunRow], *, in_part: bool) -> dict[str, Config]:
        """Return key → configuration of the runs that match.

        Of an altered run only the parts whose digest holds are compared; with ``in_part`` its unknown fields match.
        """
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
        """Return config.json; if a number of ranks is asked for, ``auto`` becomes the run's actual number."""
        config: Config = folder.read_json(run_folder.CONFIG) or {}
        cluster = config.get("cluster")
        if (
            not isinstance(self.values.get(f"cluster.{_NPROC}"), int)
            or not isinstance(cluster, Mapping)
            or cluster.get(_NPROC) != "auto"
        ):
            return config
        counts = {*ranks_of(folder.read_json(run_folder.KEY) or {}, folder.read_json(run_folder.PLAN) or {})}
        return {**config, "cluster": {**cluster, _NPROC: counts.pop()}} if len(counts) == 1 else config

    def matches(self, config: Config, *, unknown_matches: bool = False) -> bool:
        """Whether a configuration has all values."""
        sections = {name.partition(".")[0] for name in self.values}
        fields = dict(flat({name: config[name] for name in sections if name in config}))
        return all(fields[name] == value if name in fields else unknown_matches for name, value in self.values.items())


def filter_of(words: Sequence[str], resolved: Mapping[str, Any]) -> RunFilter:
    """Return the filter for overrides, of which ``resolved`` is composed.

    Raises UsageError: a word about something that no run folder holds.
    """
    values: dict[str, Any] = {}
    experiments = frozenset(word for word in words if word.startswith("experiment="))
    for word in for_hydra([word for word in words if word not in experiments]):
        name = word.lstrip("+~").partition("=")[0]
        is_group = "." not in name and isinstance(resolved.get(name), Mapping)
        for field in (stands_for(name, words) or [name]) if is_group else [name]:  # of a group without an option all
            try:
                value = functools.reduce(operator.getitem, field.split("."), resolved)
            except (LookupError, TypeError) as error:
                raise UsageError(
                    f"{word.lstrip('+')}: a run doesn't tell its {field}; choose by what that sets, such as model=…"
                ) from error
            values |= flat(value, field)
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
    comparable: dict[str, Config]  # by key, {} of an altered run, and of all if there are more than a thousand
    is_empty: bool  # the folder of runs holds no run


def selected(current: Session, state: str | None = None) -> Selection:
    """Return the matching runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    runs_dir, chosen = current.config.runs_dir, filter_of(current.invocation.overrides, current.config.resolved)
    rows = in_state(index.rows(runs_dir), state)
    is_empty = not rows and state is None
    configs: dict[str, Config] = {row.key: {} for row in rows}
    if any(chosen) or len(rows) <= _MOST_COMPARED:
        configs = chosen.configs(runs_dir, rows, in_part=True)
    rows = [row for row in rows if row.key in configs]
    can_compare = len(rows) <= _MOST_COMPARED
    comparable = {row.key: configs[row.key] if can_compare and row.state != index.ALTERED else {} for row in rows}
    return Selection(rows, comparable, is_empty)


# ------------------------------------------------------------------------------------------- the list
_IN_OTHER_COLUMNS = (
    "dataset.name",
    "model.name",
    "optimizer.name",
    "program.name",
    "program.script",
)  # the table shows these fields for every run
_NOT_COMPARED = ("cluster.", "paths.", "tracking.")  # these fields say where a run ran, not what it computed
_ENV = "cluster.env."  # compared all the same: environment variables are part of the key
_MOST_COMPARED = 1000  # runs that are compared for the fields in which they differ
_MOST_MEASURED = 200  # runs whose sizes --wide shows: measuring a run takes a millisecond


def runs(current: Session) -> None:
    """List runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    order, as_json, is_wide = options.get("sort", "time"), wants_json(), current.invocation.is_on("wide")
    rows, comparable, is_empty = selected(current, options.get("state"))
    measures = as_json or order == "size" or (is_wide and len(rows) <= _MOST_MEASURED)
    sizes_bytes = {row.key: measured(runs_dir / row.key).bytes for row in rows} if measures else {}
    rows = _in_order(rows, order, sizes_bytes)
    differing = differences(comparable)
    if as_json:
        answer([{**asdict(row), "bytes": sizes_bytes[row.key], "differs": differing[row.key]} for row in rows])
    elif is_empty:
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
        say("\n".join(_coloured(printable, [row.state for row in rows])), painted=True)
        if left_out:
            note(f"no room here for {', '.join(left_out)}: doit runs --wide shows all, --json as JSON")


def _coloured(lines: Sequence[str], states: Sequence[str]) -> list[str]:
    if not takes_colours(sys.stdout, os.environ):
        return [*lines]
    at, head = STATE_AT, len(lines) - len(states)
    return [*lines[:head]] + [
        f"{line[:at]}\x1b[{STATE_INKS.get(state, '0')}m{state}\x1b[0m{line[at + len(state) :]}"
        if line[at:].startswith(state)
        else line
        for line, state in zip(lines[head:], states, strict=True)
    ]


def _in_order(rows: Sequence[RunRow], order: str, sizes_bytes: Mapping[str, int]) -> list[RunRow]:
    """Sort the runs; the best, newest or largest comes last, above the next prompt."""
    if order == "size":
        return sorted(rows, key=lambda row: sizes_bytes[row.key])
    if order in ("accuracy", "train_s"):
        return sorted(rows, key=lambda row: -1.0 if getattr(row, order) is None else getattr(row, order))
    return sorted(rows, key=lambda row: row.unix_time if order == "time" else getattr(row, order))


def differences(configs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """Return key → the fields in which the runs differ, with this run's values.

    Fields of places and of other columns are left out. A field is compared among the runs that have it, a script's
    arguments among all scripts, environment variables of the ranks among all runs.
    """
    fields_by_run = {key: dict(flat(config)) for key, config in configs.items()}
    names = [
        name
        for name in sorted({name for fields in fields_by_run.values() for name in fields})
        if name not in _IN_OTHER_COLUMNS and (name.startswith(_ENV) or not name.startswith(_NOT_COMPARED))
    ]
    scripts = [key for key, config in configs.items() if "program" in config]

    def compared_runs(name: str) -> list[str]:
        if name.startswith("program."):
            return scripts
        if name.startswith(_ENV):
            return [key for key, fields in fields_by_run.items() if fields]
        return [key for key, fields in fields_by_run.items() if name in fields]

    differing = [name for name in names if len({repr(fields_by_run[key].get(name)) for key in compared_runs(name)}) > 1]
    return {
        key: {
            name: fields[name]
            for name in differing
            if name in fields and not (name.startswith("program.") and fields[name] in (None, "", [], {}))
        }
        for key, fields in fields_by_run.items()
    }
