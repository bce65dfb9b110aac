"""`doit runs`: list all runs, or the runs that match given overrides, and the fields in which they differ."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from pipeline.cli.finished import other_hardware
from pipeline.cli.output import STATE_INKS, answer, note, say, wants_json, width
from pipeline.cli.session import Session, relative
from pipeline.comparing.listing import STATE_AT, Listed, table, wide_table
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


class Filter(NamedTuple):
    """What overrides ask of runs.

    ``values`` are fields with their values; a group's option asks for all fields that it sets. ``experiments`` are the
    words ``experiment=NAME``: config.json lacks them, so they are compared with a run's overrides.
    """

    values: Mapping[str, Any]
    experiments: frozenset[str]

    def config_of(self, folder: RunFolder, *, altered: bool, in_part: bool = False) -> dict[str, Any] | None:
        """Return the configuration of a run that matches ({} without config.json), else None.

        Args:
            altered: only the parts whose digest holds count, because config.json may have been edited.
            in_part: unknown fields match.
        """
        if self.experiments and not self.experiments <= {*folder.overrides()}:
            return None
        config = dict(intact_parts(folder).get("config", {})) if altered else self._config(folder)
        return config if matches(config, self.values, in_part=in_part) else None

    def _config(self, folder: RunFolder) -> dict[str, Any]:
        """Return config.json; if a number of ranks is wanted, ``auto`` becomes the run's actual number."""
        config: dict[str, Any] = folder.read_json(run_folder.CONFIG) or {}
        cluster = config.get("cluster")
        if (
            not isinstance(self.values.get(f"cluster.{_NPROC}"), int)
            or not isinstance(cluster, Mapping)
            or cluster.get(_NPROC) != "auto"
        ):
            return config
        counts = {*ranks_of(folder.read_json(run_folder.KEY) or {}, folder.read_json(run_folder.PLAN) or {})}
        return {**config, "cluster": {**cluster, _NPROC: counts.pop()}} if len(counts) == 1 else config


def filter_of(words: Sequence[str], resolved: Mapping[str, Any]) -> Filter:
    """Return what overrides, of which ``resolved`` is composed, ask of runs. Raises UsageError: no run tells that."""
    wanted: dict[str, Any] = {}
    experiments = frozenset(word for word in words if word.startswith("experiment="))
    for word in for_hydra([word for word in words if word not in experiments]):
        name = word.lstrip("+~").partition("=")[0]
        of_group = "." not in name and isinstance(resolved.get(name), Mapping)
        for field in (stands_for(name, words) or [name]) if of_group else [name]:  # of a group without an option all
            try:
                value = functools.reduce(operator.getitem, field.split("."), resolved)
            except (LookupError, TypeError) as error:
                raise UsageError(
                    f"{word.lstrip('+')}: a run doesn't tell its {field}; choose by what that sets, such as model=…"
                ) from error
            wanted |= flat(value, field)
    for name in placeholders(wanted):
        raise UsageError(f"{name} is secret, which no file of a run tells; leave it out")
    return Filter({name: value for name, value in wanted.items() if name != RUNS_DIR}, experiments)


def matches(config: Mapping[str, Any], wanted: Mapping[str, Any], *, in_part: bool = False) -> bool:
    """Whether a configuration has all wanted values; if it is known only ``in_part``, unknown fields match."""
    sections = {name.partition(".")[0] for name in wanted}
    known = dict(flat({name: config[name] for name in sections if name in config}))
    return all(known[name] == value if name in known else in_part for name, value in wanted.items())


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


class Selection(NamedTuple):
    """The runs that match the overrides and the state, oldest first.

    ``comparable`` are their configurations by key, to compare field by field. An altered run has {}; all runs have {}
    if there are more than a thousand.
    """

    rows: list[RunRow]
    comparable: dict[str, dict[str, Any]]
    is_empty: bool  # the folder of runs holds no run


def selected(current: Session, state: str | None = None) -> Selection:
    """Return the matching runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    runs_dir, chosen = current.config.runs_dir, filter_of(current.invocation.overrides, current.config.resolved)
    rows = of_state(index.rows(runs_dir), state)
    is_empty = not rows and state is None
    altered = {row.key for row in rows if row.state == index.ALTERED}
    configs: dict[str, dict[str, Any] | None] = {row.key: {} for row in rows}
    if any(chosen) or len(rows) <= _MOST_COMPARED:
        for key in configs:
            configs[key] = chosen.config_of(RunFolder(runs_dir / key), altered=key in altered, in_part=key in altered)
    rows = [row for row in rows if configs[row.key] is not None]
    left_out = altered if len(rows) <= _MOST_COMPARED else configs.keys()
    comparable = {row.key: {} if row.key in left_out else configs[row.key] or {} for row in rows}
    return Selection(rows, comparable, is_empty)


def runs(current: Session) -> None:
    """List runs. Raises UsageError: an unknown state, or an override that run folders don't store."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    by, as_json = options.get("sort", "time"), wants_json()
    wide = current.invocation.is_on("wide")
    rows, comparable, is_empty = selected(current, options.get("state"))
    measures = as_json or by == "size" or (wide and len(rows) <= _MOST_MEASURED)
    sizes = {row.key: measured(runs_dir / row.key).bytes for row in rows} if measures else {}
    rows = _in_order(rows, by, sizes)
    differing = differences(comparable)
    if as_json:
        answer([{**asdict(row), "bytes": sizes[row.key], "differs": differing[row.key]} for row in rows])
        return
    if is_empty:
        say(f"no runs under {relative(runs_dir)} yet; start one: doit train experiment=quickstart")
    elif not rows:
        say(f"no run under {relative(runs_dir)} matches these values")
    else:
        listed = [
            Listed(
                row=row,
                name=RunFolder(runs_dir / row.key).short_name(comparable[row.key]) if comparable[row.key] else "",
                marks="other hardware" if other_hardware({"hosts": row.hosts, "hardware": row.hardware}) else "",
                size_bytes=sizes.get(row.key),
                differing=differing[row.key],
            )
            for row in rows
        ]
        lines, left_out = wide_table(listed) if wide else table(listed, width=width(), now=time.time())
        printable = printable_lines("\n".join(lines)).split("\n")
        say("\n".join(_coloured(printable, [row.state for row in rows])), painted=True)
        if left_out:
            note(f"no room here for {', '.join(left_out)}: doit runs --wide shows all, --json as JSON")


def _coloured(lines: Sequence[str], states: Sequence[str]) -> list[str]:
    """Colour each state, if stdout is a terminal that shows colours."""
    if not takes_colours(sys.stdout, os.environ):
        return [*lines]
    at, head = STATE_AT, len(lines) - len(states)
    return [*lines[:head]] + [
        f"{line[:at]}\x1b[{STATE_INKS.get(state, '0')}m{state}\x1b[0m{line[at + len(state) :]}"
        if line[at:].startswith(state)
        else line
        for line, state in zip(lines[head:], states, strict=True)
    ]


def of_state(rows: Sequence[RunRow], state: str | None) -> list[RunRow]:
    """Return the runs in this state. Raises UsageError: there is no such state."""
    if state is not None and state.upper() not in index.STATES:
        raise UsageError(f"state={state} is no state of a run; {suggestion(state.upper(), index.STATES)}")
    return [row for row in rows if state is None or row.state == state.upper()]


def _in_order(rows: Sequence[RunRow], by: str, sizes: Mapping[str, int]) -> list[RunRow]:
    """Sort the runs; the best, newest or largest comes last, above the next prompt. ``sizes`` in bytes, by key."""
    if by == "size":
        return sorted(rows, key=lambda row: sizes[row.key])
    if by in ("accuracy", "train_s"):
        return sorted(rows, key=lambda row: -1.0 if getattr(row, by) is None else getattr(row, by))
    return sorted(rows, key=lambda row: row.unix_time if by == "time" else getattr(row, by))


# ------------------------------------------------------------------------------------------------ pure
def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return key → the fields in which the runs differ, without the fields of places and of other columns.

    A field is compared among the runs that have it: another model may lack it. A script's arguments are compared among
    all scripts, environment variables of the ranks among all runs. A script's unset arguments are left out.
    """
    known = {key: dict(flat(config)) for key, config in configs.items()}
    names = sorted({name for fields in known.values() for name in fields})
    compared = [
        name
        for name in names
        if name not in _IN_OTHER_COLUMNS and (name.startswith(_ENV) or not name.startswith(_NOT_COMPARED))
    ]
    keys_by_field = {name: [key for key in known if name in known[key]] for name in compared}
    of_scripts = [key for key, config in configs.items() if "program" in config]
    keys_by_field |= {name: of_scripts for name in compared if name.startswith("program.")}
    keys_by_field |= {name: [key for key in known if known[key]] for name in compared if name.startswith(_ENV)}
    differing = [name for name in compared if len({repr(known[key].get(name)) for key in keys_by_field[name]}) > 1]
    of_program = [name for name in differing if name.startswith("program.")]
    return {
        key: {
            name: fields[name]
            for name in differing
            if name in fields and not (name in of_program and fields[name] in (None, "", [], {}))
        }
        for key, fields in known.items()
    }
