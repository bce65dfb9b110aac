"""`doit runs`: the runs there are, those that the words ask for, and in which fields they differ."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import relative, session
from pipeline.core.errors import UsageError, suggestion

if TYPE_CHECKING:
    from pipeline.runs.index import Row

_SORTED_BY = ("accuracy", "key", "state", "time")
_TOLD = ("dataset.name", "model.name", "optimizer.name")  # each line begins with these
_ELSEWHERE = ("cluster.", "paths.", "tracking.")  # where it was run, and not what
_MOST = 1000  # runs whose configurations are read for the fields in which they differ


def runs() -> None:
    """Raises UsageError: a state, an order or a word that no run can be chosen by."""
    from pipeline.runs import index
    from pipeline.runs.folder import RunFolder

    options, runs_dir = session().asked.options, session().config.runs_dir
    wanted = _wanted(session().asked.overrides, session().config.resolved)
    rows = _of_state(index.rows(runs_dir), options.get("state"), index.STATES)
    in_full = bool(wanted) or len(rows) <= _MOST
    configs = {row.key: RunFolder(runs_dir / row.key).read_json("config.json") or {} for row in rows if in_full}
    rows = _in_order([row for row in rows if matches(configs.get(row.key, {}), wanted)], options.get("sort", "time"))
    differing = differences({row.key: configs.get(row.key, {}) for row in rows})
    if is_on(options, "json"):
        say(json.dumps([{**asdict(row), "differs": differing[row.key]} for row in rows], indent=2))
        return
    if not rows and (wanted or "state" in options):
        say(f"no run under {relative(runs_dir)} has these values")
    elif not rows:
        say(f"no runs under {relative(runs_dir)} yet; start one: doit train experiment=quickstart")
    for row in rows:
        say(_line(row, differing[row.key]))


def _line(row: Row, differing: Mapping[str, Any]) -> str:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.unix_time))
    accuracy = "" if row.accuracy is None else f"test/accuracy {row.accuracy:.4f}"
    warning = "  SYNTHETIC DATA" if row.synthetic else ""
    words = "".join(f"  {name}={_shown(value)}" for name, value in differing.items())
    return f"{row.key}  {row.state:<8}  {day}  {row.what:<28} {row.nodes:<14} {accuracy}{words}{warning}{row.note}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_state(rows: Sequence[Row], state: str | None, known: Sequence[str]) -> list[Row]:
    if state is not None and state.upper() not in known:
        raise UsageError(f"state={state} is no state of a run; {suggestion(state.upper(), known)}")
    return [row for row in rows if state is None or row.state == state.upper()]


def _in_order(rows: Sequence[Row], by: str) -> list[Row]:
    """What is best, or newest, stands last: above the next prompt."""
    if by not in _SORTED_BY:
        raise UsageError(f"sort={by} is no order; {suggestion(by, _SORTED_BY)}")
    if by == "accuracy":
        return sorted(rows, key=lambda row: -1.0 if row.accuracy is None else row.accuracy)
    return sorted(rows, key=lambda row: row.unix_time if by == "time" else getattr(row, by))


# ------------------------------------------------------------------------------------------------ pure
def _wanted(words: Sequence[str], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields and the values that the words give them; of a group the option's name. Raises UsageError."""
    wanted: dict[str, Any] = {}
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        section, _, field = name.partition(".")
        if section in ("paths", "tracking"):  # where runs and records lie
            continue
        if field:
            wanted[name] = dict(flat(resolved)).get(name)
        elif not isinstance(resolved.get(section), Mapping):
            if section not in resolved:
                raise UsageError(f"{word}: a run doesn't tell its {section}; choose by what that sets, such as model=…")
            wanted[section] = resolved[section]
        else:
            key = "launcher" if section == "cluster" else "name"
            if key in resolved[section]:  # else there is but one option
                wanted[f"{section}.{key}"] = resolved[section][key]
    return wanted


def matches(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a run's configuration has all wanted values."""
    known = dict(flat(config)) if wanted else {}
    return all(name in known and known[name] == value for name, value in wanted.items())


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Key → the fields in which the runs differ, but for where they ran and what each line begins with."""
    known = {key: dict(flat(config)) for key, config in configs.items()}
    names = sorted({name for fields in known.values() for name in fields})
    telling = [name for name in names if name not in _TOLD and not name.startswith(_ELSEWHERE)]
    all_of = [name for name in telling if len({repr(fields.get(name)) for fields in known.values() if fields}) > 1]
    return {key: {name: fields[name] for name in all_of if name in fields} for key, fields in known.items()}


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """``optimizer.lr`` and its value, of every field."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
