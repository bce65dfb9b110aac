"""`doit runs`: list the runs, or those that match the words, and the fields in which they differ."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from pipeline.cli import answers
from pipeline.cli.commands.finished import other_arithmetic
from pipeline.cli.invocation import is_on
from pipeline.cli.output import STATE_INKS, note, say, width
from pipeline.cli.session import Session, relative, session
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
from pipeline.runs.index import Row, intact_parts
from pipeline.runs.removal import measured
from trainers.contract import run_folder

PLACE = "paths.runs"
"""Whose folders are looked through; where it lies isn't asked of a run."""
_EXPERIMENT = "experiment="
_RANK = "nproc_per_node"
_RANKS = f"cluster.{_RANK}"


def wanted_values(words: Sequence[str], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields and values that the words ask for; for a group, those that its option sets.

    ``experiments_of`` the words are left out.

    Raises:
        UsageError: a word about something that run folders don't store.
    """
    wanted: dict[str, Any] = {}
    experiments = experiments_of(words)
    for word in for_hydra([word for word in words if word not in experiments]):
        name = word.lstrip("+~").partition("=")[0]
        of_group = "." not in name and isinstance(resolved.get(name), Mapping)
        for field in _set_by(name, words) if of_group else [name]:
            try:
                value = functools.reduce(operator.getitem, field.split("."), resolved)
            except (LookupError, TypeError) as error:
                raise UsageError(
                    f"{word.lstrip('+')}: a run doesn't tell its {field}; choose by what that sets, such as model=…"
                ) from error
            wanted |= flat(value, field)
    for name in placeholders(wanted):
        raise UsageError(f"{name} is secret, which no file of a run tells; leave it out")
    return {name: value for name, value in wanted.items() if name != PLACE}


def experiments_of(words: Sequence[str]) -> frozenset[str]:
    """Return the words ``experiment=NAME``, which only the words that started a run tell."""
    return frozenset(word for word in words if word.startswith(_EXPERIMENT))


def started_with(folder: RunFolder, experiments: frozenset[str]) -> bool:
    """Whether these words are among those that made the run."""
    return not experiments or experiments <= {*folder.overrides()}


def _set_by(group: str, words: Sequence[str]) -> Sequence[str]:
    """Return the fields that a group's option sets; the whole section without an option."""
    return stands_for(group, words) or [group]


def config_of(folder: RunFolder, wanted: Mapping[str, Any], *, altered: bool = False) -> dict[str, Any]:
    """Return config.json, {} without one. If a number of ranks is wanted, ``auto`` becomes the run's actual number.

    Of an ``altered`` run only the certain parts: config.json may have been edited.
    """
    if altered:
        return dict(intact_parts(folder).get("config", {}))
    config: dict[str, Any] = folder.read_json(run_folder.CONFIG) or {}
    cluster = config.get("cluster")
    if not isinstance(wanted.get(_RANKS), int) or not isinstance(cluster, Mapping) or cluster.get(_RANK) != "auto":
        return config
    counts = {*ranks_of(folder.read_json(run_folder.KEY) or {}, folder.read_json(run_folder.PLAN) or {})}
    return {**config, "cluster": {**cluster, _RANK: counts.pop()}} if len(counts) == 1 else config


def matches(config: Mapping[str, Any], wanted: Mapping[str, Any], *, in_part: bool = False) -> bool:
    """Whether a configuration has all wanted values; if it is known only ``in_part``, unknown fields match."""
    sections = {name.partition(".")[0] for name in wanted}
    known = dict(flat({name: config[name] for name in sections if name in config}))
    return all(known[name] == value if name in known else in_part for name, value in wanted.items())


_SORTED_BY = ("accuracy", "key", "size", "state", "time", "train_s")
_OWN_COLUMNS = (
    "dataset.name",
    "model.name",
    "optimizer.name",
    "program.name",
    "program.script",
)  # each line begins with these
_ELSEWHERE = ("cluster.", "paths.", "tracking.")  # where it was run, and not what
_VARIABLES = "cluster.env."  # these count in the key
_MOST = 1000  # runs that are compared for the fields in which they differ
_MOST_MEASURED = 200  # whose files are counted, a millisecond each: unless the words ask for sizes


class Selection(NamedTuple):
    """The runs that overrides and a state choose, oldest first, with their configurations by key.

    ``comparable`` are the configurations to compare field by field: none of altered runs, and none at all of more than
    a thousand runs.
    """

    rows: list[Row]
    comparable: dict[str, dict[str, Any]]
    is_empty: bool  # there is no run at all


def selected(current: Session, state: str | None = None) -> Selection:
    """Return the chosen runs. Raises UsageError: a state or an override that no run can be chosen by."""
    words, runs_dir = current.invocation.overrides, current.config.runs_dir
    wanted, experiments = wanted_values(words, current.config.resolved), experiments_of(words)
    rows = of_state(index.rows(runs_dir), state, index.STATES)
    altered = {row.key for row in rows if row.state == index.ALTERED}
    is_empty = not rows and state is None
    rows = [row for row in rows if started_with(RunFolder(runs_dir / row.key), experiments)]
    configs: dict[str, dict[str, Any]] = {}
    if wanted or len(rows) <= _MOST:
        configs = {
            row.key: config_of(RunFolder(runs_dir / row.key), wanted, altered=row.key in altered) for row in rows
        }
    rows = [row for row in rows if matches(configs.get(row.key, {}), wanted, in_part=row.key in altered)]
    left_out = altered if len(rows) <= _MOST else {row.key for row in rows}
    comparable = {row.key: {} if row.key in left_out else configs.get(row.key, {}) for row in rows}
    return Selection(rows, comparable, is_empty)


def runs() -> None:
    """List runs. Raises UsageError: a state, an order or a word that no run can be chosen by."""
    options, runs_dir = session().invocation.options, session().config.runs_dir
    by, as_json = options.get("sort", "time"), is_on(options, "json")
    wide = is_on(options, "wide")
    rows, comparable, is_empty = selected(session(), options.get("state"))
    measures = as_json or by == "size" or (wide and len(rows) <= _MOST_MEASURED)
    sizes = {row.key: measured(runs_dir / row.key).bytes for row in rows} if measures else {}
    rows = _in_order(rows, by, sizes)
    differing = differences(comparable)
    if as_json:
        answers.answer([{**asdict(row), "bytes": sizes[row.key], "differs": differing[row.key]} for row in rows])
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
                marks="other arithmetic" if other_arithmetic({"hosts": row.hosts, "hardware": row.hardware}) else "",
                size_bytes=sizes.get(row.key),
                differing=differing[row.key],
            )
            for row in rows
        ]
        lines, left_out = wide_table(listed) if wide else table(listed, width=width(), now=time.time())
        printable = printable_lines("\n".join(lines)).split("\n")
        say("\n".join(_inked(printable, [row.state for row in rows])), painted=True)
        if left_out:
            note(f"no room here for {', '.join(left_out)}: doit runs --wide shows all, --json as JSON")


def _inked(lines: Sequence[str], states: Sequence[str]) -> list[str]:
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


def of_state(rows: Sequence[Row], state: str | None, known: Sequence[str]) -> list[Row]:
    """Return the runs in this state. Raises UsageError: there is no such state."""
    if state is not None and state.upper() not in known:
        raise UsageError(f"state={state} is no state of a run; {suggestion(state.upper(), known)}")
    return [row for row in rows if state is None or row.state == state.upper()]


def _in_order(rows: Sequence[Row], by: str, sizes: Mapping[str, int]) -> list[Row]:
    """Sort the runs; the best, newest or largest comes last, above the next prompt. ``sizes`` in bytes, by key."""
    if by not in _SORTED_BY:
        raise UsageError(f"sort={by} is no order; {suggestion(by, _SORTED_BY)}")
    if by == "size":
        return sorted(rows, key=lambda row: sizes[row.key])
    if by in ("accuracy", "train_s"):
        return sorted(rows, key=lambda row: -1.0 if getattr(row, by) is None else getattr(row, by))
    return sorted(rows, key=lambda row: row.unix_time if by == "time" else getattr(row, by))


# ------------------------------------------------------------------------------------------------ pure
def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return key → the fields in which the runs differ, without places, and without what each line begins with.

    A field is compared among the runs that have it: another kind of model lacks it, which the model's name shows. A
    script's arguments are compared with every script, variables of the ranks with every run; unset ones are left out.
    """
    known = {key: dict(flat(config)) for key, config in configs.items()}
    names = sorted({name for fields in known.values() for name in fields})
    telling = [
        name
        for name in names
        if name not in _OWN_COLUMNS and (name.startswith(_VARIABLES) or not name.startswith(_ELSEWHERE))
    ]
    having = {name: [key for key in known if name in known[key]] for name in telling}
    having |= {name: _scripts(configs) for name in telling if name.startswith("program.")}
    having |= {name: [key for key in known if known[key]] for name in telling if name.startswith(_VARIABLES)}
    all_of = [name for name in telling if len({repr(known[key].get(name)) for key in having[name]}) > 1]
    return {
        key: {name: fields[name] for name in all_of if name in fields and not _is_unset(name, fields[name])}
        for key, fields in known.items()
    }


def _scripts(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [key for key, config in configs.items() if "program" in config]


def _is_unset(name: str, value: Any) -> bool:
    return name.startswith("program.") and value in (None, "", [], {})
