"""All run folders together: find one by its key, and list them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core import locks
from pipeline.core.documents import DamagedError
from pipeline.core.errors import UsageError, os_reason
from pipeline.core.errors import nearest as nearest_word
from pipeline.core.specs import LAST, UNDER_WAY, State
from pipeline.core.tables import first_of
from pipeline.keys import content_key
from pipeline.keys.content_key import KEY_LENGTH, KEY_VERSION, Difference
from pipeline.runs import acceptance, journal
from pipeline.runs import result as results
from pipeline.runs.contents import hosts_of, is_newer, ranks_of, what_runs
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError, Result, Stamps
from trainers.contract import run_folder

NEWER = "NEWER"
"""State in a list of a run that a newer Paceline wrote. Nothing else of it is read."""
ALTERED = "ALTERED"
"""State of a run whose result, key or configuration was changed afterwards. No figure of it is shown."""
ACCEPTED = "ACCEPTED"
"""State of a key for which a user has accepted another finished run."""
STATES = (*State, NEWER, ALTERED, ACCEPTED)
_INCOMPLETE = "its key is not complete: doit why names what it lacks"
"""Remark on a run that read a file which its key lacks: the same command runs it again."""
_UNPROVEN = "unproven"
"""Remark on a script's run that was not repeated yet: it might come out differently."""
WITHOUT_RESULT = "trained, without its result.json: the command that started it completes it"
"""Remark on a run whose command ended before it wrote result.json, or whose result.json was removed."""
_AGAIN = "the command that started it makes it again"
_OF_A_RUN = (run_folder.KEY, run_folder.RESULT)
"""A folder with one of these files is a run: a finished run without its key is listed as such."""
_LISTED = (run_folder.KEY, run_folder.CONFIG)
"""The files by which a list selects runs."""
_ENDED_BADLY = (State.FAILED, State.KILLED)
_MOST_NAMED = 12
"""How many keys an error lists."""
_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in a list. ``figures`` are all metrics of a finished run; ``metrics`` the same for a script's run, empty
    for any other. ``nodes`` describes the ranks of each node. ``train_s`` is the duration of a finished training.
    ``note`` is a remark; ``nonfinite`` names a script's metric that was NaN or infinite; ``error`` is the first line of
    that of a failed or killed run.
    """

    key: str
    state: str
    what: str
    nodes: str
    hosts: tuple[str, ...]
    train_s: float | None
    accuracy: float | None
    synthetic: bool
    unix_time: float
    note: str = ""
    nonfinite: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def find(runs_dir: Path, named: str) -> RunFolder:
    """Return the run whose key, or MLflow run id, begins so; ``last`` is the newest. Raises UsageError."""
    if named == LAST:
        if not (known := rows(runs_dir)):
            raise UsageError(f"no runs under {runs_dir} yet", hint="doit train experiment=quickstart")
        named = known[-1].key
    keys = sorted(_keys(runs_dir))
    matches = [key for key in keys if named and key.startswith(named)]
    if not matches and is_mlflow_id(named):
        matches = [key for key in keys if _mlflow_run_id(RunFolder(runs_dir / key)) == named]
    if len(matches) > 1:
        shown = first_of(matches, _MOST_NAMED)
        raise UsageError(f"{named} is the beginning of {len(matches)} keys: {shown}", hint="doit runs")
    if not matches:
        raise UsageError(f"{named or repr(named)}: no such run under {runs_dir}; {_did_you_mean(named, keys)}")
    folder = RunFolder(runs_dir / matches[0])
    folder.refuse_newer()
    return folder


def only_under_way(runs_dir: Path, verb: str) -> RunFolder | None:
    """Return the run that is under way, or None. Raises UsageError, which names ``verb``: several are."""
    keys = [row.key for row in rows(runs_dir) if row.state in UNDER_WAY]
    if len(keys) > 1:
        raise UsageError(f"{len(keys)} runs are under way: {', '.join(keys)}", hint=f"doit {verb} {keys[-1]}")
    return RunFolder(runs_dir / keys[0]) if keys else None


def has_runs(runs_dir: Path) -> bool:
    """Whether there is any run, of whatever state; reads no file."""
    return any(_keys(runs_dir))


def names_run(runs_dir: Path, word: str) -> bool:
    """Whether the key of a run begins with ``word``."""
    return bool(word) and any(key.startswith(word) for key in _keys(runs_dir))


def _did_you_mean(named: str, keys: Sequence[str]) -> str:
    if len(keys) <= _MOST_NAMED:
        valid = f"valid: {', '.join(keys) if keys else '(none)'}"
    else:
        valid = f"doit runs lists the {len(keys)} that there are"
    beginnings = {key[: len(named)]: key for key in keys}
    close = nearest_word(named, beginnings)
    return f"did you mean {beginnings[close]}? {valid}" if close else valid


def is_mlflow_id(named: str) -> bool:
    """Whether the text has the form of an MLflow run id; keys are shorter."""
    return _MLFLOW_ID.fullmatch(named) is not None


def rows(runs_dir: Path) -> list[RunRow]:
    """Return all runs, oldest first. Reads one file per finished run, so ten thousand take a second."""
    candidates = (_row_if_there(RunFolder(runs_dir / key)) for key in _keys(runs_dir))
    return sorted((item for item in candidates if item is not None), key=lambda item: item.unix_time)


def _row_if_there(folder: RunFolder) -> RunRow | None:
    try:
        return row(folder)
    except FileNotFoundError:
        if folder.path.is_dir():
            raise
        return None


def finished_parts(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """Return key → content of key.json for every finished run that this version can read."""
    parts = {}
    for key in _keys(runs_dir):
        known = RunFolder(runs_dir / key).read_json(run_folder.KEY)
        if known is not None and not is_newer(known) and (runs_dir / key / run_folder.RESULT).is_file():
            parts[key] = known
    return parts


def nearest(
    runs_dir: Path, finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]
) -> tuple[str, list[Difference]] | None:
    """Return the intact run with the fewest differing fields, and these; not one with an incomplete key."""
    left = dict(finished)
    while (closest := content_key.nearest(left, new)) is not None:
        key, differing = closest
        folder = RunFolder(runs_dir / key)
        if not folder.unkeyed() and (not differing or row(folder).state != ALTERED):
            return closest
        del left[key]
    return None


def is_run(folder: RunFolder) -> bool:
    """Whether lists show the folder."""
    return any((folder.path / name).is_file() for name in _OF_A_RUN)


def _keys(runs_dir: Path) -> Iterator[str]:
    if runs_dir.is_dir():
        for name in os.listdir(runs_dir):  # noqa: PTH208  (names alone: ten thousand Paths cost 50 ms)
            if len(name) == KEY_LENGTH and any(os.path.isfile(f"{runs_dir}/{name}/{one}") for one in _OF_A_RUN):  # noqa: PTH113
                yield name


def _mlflow_run_id(folder: RunFolder) -> Any:
    noted = (folder.read_json(run_folder.TRACKING) or {}).get("run_id")
    return noted or (folder.read_json(run_folder.RESULT) or {}).get("mlflow_run_id")


def row(folder: RunFolder) -> RunRow:
    """Return the row of one run. Raises OSError: there is no such folder."""
    result, accepted = None, None
    try:
        result, accepted = acceptance.result_or_accepted(folder)
        altered = altered_target(folder, result) if accepted is None else ""
    except AlteredError as error:
        altered = str(error.what)
    if altered:  # a command that holds the lock is making it again
        return _row_in_full(folder, "" if locks.is_held(folder.lock) else altered)
    if result is None or _begins_newer(folder):
        return _row_in_full(folder)
    return RunRow(
        key=folder.key,
        state=result.state if accepted is None else ACCEPTED,
        what=result.what,
        nodes=_nodes(result.nproc_per_node),
        hosts=result.hosts,
        train_s=result.train_s,
        accuracy=result.metrics.get("test/accuracy"),
        synthetic=result.synthetic,
        unix_time=result.unix_time,
        note=str(accepted) if accepted is not None else _remark(result),
        nonfinite=results.nonfinite_note(result.fields),
        metrics=result.metrics if result.fields.get("program") else {},
        figures=result.metrics,
        hardware=result.fields.get("hardware") or {},
    )


def _remark(result: Result) -> str:
    if result.fields.get("unkeyed"):
        return _INCOMPLETE
    return _UNPROVEN if result.fields.get("proven") is False else ""


def altered_target(folder: RunFolder, result: Result | None, names: Sequence[str] | None = None) -> str:
    """Return the first altered target with the reason; '' if all are intact. ``names``: the targets to look at; None,
    for lists: all, where a copy of equal size and time is intact unless lists choose by it. Raises AlteredError.
    """
    if result is None:
        return ""
    try:
        doubted = [
            (name, expected)
            for name, expected in result.files.items()
            if (names is None or name in names)
            and not results.is_stamped(f"{folder.path}/{name}", expected, copied=names is None and name not in _LISTED)
        ]
        altered = Stamps(folder.path).first_altered(doubted)
    except DamagedError as error:
        raise folder.altered(run_folder.RESULT, str(error)) from error
    except OSError as error:
        return os_reason(error)
    return "" if altered is None else f"{folder.path / altered[0]} {altered[1]}"


def _begins_newer(folder: RunFolder) -> bool:
    """Read the version from the first bytes of key.json; a damaged file has none."""
    with (folder.path / run_folder.KEY).open("rb") as file:
        version = re.search(rb'"version": *([^,\s]+)', file.read(256))
    known = version is not None and version[1].isdigit() and int(version[1]) <= KEY_VERSION
    return version is not None and not known and is_newer(folder.read_json(run_folder.KEY) or {})


def intact_parts(folder: RunFolder) -> Mapping[str, Any]:
    """Return the certain parts of an altered run: the content of key.json if it gives the run's key, else nothing."""
    try:
        key = folder.read_key()
    except AlteredError:
        return {}
    return {} if key is None else key.parts


def _row_in_full(folder: RunFolder, altered: str = "") -> RunRow:
    """Return the row of a run without a trustworthy result; edited parts are left out."""
    known: Mapping[str, Any] = folder.read_json(run_folder.KEY) or {}
    newer = is_newer(known)
    if altered and not newer:
        known = intact_parts(folder)
    config = known.get("config") if altered else folder.read_json(run_folder.CONFIG)
    config = config if isinstance(config, dict) else {}
    plan, entries = folder.read_json(run_folder.PLAN) or {}, journal.read(folder.journal)
    last = entries[-1] if entries else None
    shown, note, error = what_runs(config), "", ""
    if newer:
        state, shown = NEWER, "written by a newer Paceline"
    elif altered:
        state, note = ALTERED, f"{altered}; {_AGAIN}"
        shown = shown if known else "?"
    elif last is None:
        state = State.PLANNED
    elif last.state is State.FINISHED:  # and result.json, which is written last, isn't there yet
        state, note = State.RUNNING, WITHOUT_RESULT
    else:
        state, error = last.state, last.first_line if last.state in _ENDED_BADLY else ""
    return RunRow(
        key=folder.key,
        state=state,
        what=shown,
        nodes="?" if altered and not known else _nodes(ranks_of(known, plan)),
        hosts=hosts_of(plan),
        train_s=None,
        accuracy=None,
        synthetic=what_runs(config).startswith("synthetic "),
        unix_time=last.time if last else folder.path.stat().st_mtime,
        note=note,
        error=error,
    )


def _nodes(nproc_per_node: Sequence[int]) -> str:
    return " + ".join(str(count) for count in nproc_per_node) + (" rank" if sum(nproc_per_node) == 1 else " ranks")
