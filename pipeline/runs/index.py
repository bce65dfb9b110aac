"""The list of all run folders below ``paths.runs``: finds a run by its key, and makes the rows of `doit runs`.

A list reads one file of each finished run, its result.json, so that ten thousand runs take a second."""

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
"""State of a run that a newer Paceline wrote. Only its key.json is read."""
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
_FILES_OF_ANY_RUN = (run_folder.KEY, run_folder.RESULT)
"""A folder with one of these files is a run: a finished run without its key.json is listed, too."""
_SELECTED_BY = (run_folder.KEY, run_folder.CONFIG)
"""The files by whose contents users select runs, so an altered one would give a wrong list."""
_ENDED_BADLY = (State.FAILED, State.KILLED)
_MOST_NAMED = 12
"""How many keys an error lists."""
_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in a list.

    ``figures`` are all metrics of a finished run; ``metrics`` the same for a script's run, empty for the classifier.
    ``nodes`` is the number of ranks on each node, ``2 + 2 ranks``. ``train_s``: seconds of a finished training.
    ``nonfinite`` names a script's metric that was NaN or infinite. ``error``: the first line of a failed run's."""

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
    """Return the run whose key begins so, or that has this MLflow id; ``last``: the newest run. Raises UsageError."""
    if named == LAST:
        oldest_first = rows(runs_dir)
        if not oldest_first:
            raise UsageError(f"no runs under {runs_dir} yet", hint="doit train experiment=quickstart")
        named = oldest_first[-1].key
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
    """Return the only run that is under way, or None. Raises UsageError: several are; its hint names ``verb``."""
    keys = [row.key for row in rows(runs_dir) if row.state in UNDER_WAY]
    if len(keys) > 1:
        raise UsageError(f"{len(keys)} runs are under way: {', '.join(keys)}", hint=f"doit {verb} {keys[-1]}")
    return RunFolder(runs_dir / keys[0]) if keys else None


def has_runs(runs_dir: Path) -> bool:
    """Return True if there is any run, of whatever state; reads no file."""
    return any(_keys(runs_dir))


def names_run(runs_dir: Path, word: str) -> bool:
    """Return True if the key of a run begins with ``word``."""
    return bool(word) and any(key.startswith(word) for key in _keys(runs_dir))


def _did_you_mean(named: str, keys: Sequence[str]) -> str:
    if len(keys) <= _MOST_NAMED:
        valid = f"valid: {', '.join(keys) if keys else '(none)'}"
    else:
        valid = f"doit runs lists the {len(keys)} that there are"
    # what was typed is the beginning of a key, so it is compared with beginnings of the same length
    beginnings = {key[: len(named)]: key for key in keys}
    close = nearest_word(named, beginnings)
    return f"did you mean {beginnings[close]}? {valid}" if close else valid


def is_mlflow_id(named: str) -> bool:
    """Return True if the text has the form of an MLflow run id; keys are shorter."""
    return _MLFLOW_ID.fullmatch(named) is not None


def rows(runs_dir: Path) -> list[RunRow]:
    """Return all runs, oldest first."""
    candidates = (_row_if_there(RunFolder(runs_dir / key)) for key in _keys(runs_dir))
    return sorted((item for item in candidates if item is not None), key=lambda item: item.unix_time)


def _row_if_there(folder: RunFolder) -> RunRow | None:
    try:
        return row(folder)
    except FileNotFoundError:
        if folder.path.is_dir():
            raise
        return None  # another command removed the run meanwhile


def finished_parts(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """Return key → content of key.json for every finished run that this version can read."""
    parts_by_key = {}
    for key in _keys(runs_dir):
        parts = RunFolder(runs_dir / key).read_json(run_folder.KEY)
        if parts is not None and not is_newer(parts) and (runs_dir / key / run_folder.RESULT).is_file():
            parts_by_key[key] = parts
    return parts_by_key


def nearest(
    runs_dir: Path, finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]
) -> tuple[str, list[Difference]] | None:
    """Return the key of the finished run that is most similar to ``new``, and the differing fields; None without one.

    ``finished`` is from ``finished_parts``, ``new`` the content of the new run's key.json. A run that read files which
    its key lacks is never returned, an altered run only if no field differs."""
    candidates = dict(finished)
    while (closest := content_key.nearest(candidates, new)) is not None:
        key, differing = closest
        folder = RunFolder(runs_dir / key)
        if not folder.unkeyed() and (not differing or row(folder).state != ALTERED):
            return closest
        del candidates[key]
    return None


def is_run(folder: RunFolder) -> bool:
    """Return True if lists show the folder."""
    return any((folder.path / name).is_file() for name in _FILES_OF_ANY_RUN)


def _keys(runs_dir: Path) -> Iterator[str]:
    if runs_dir.is_dir():
        for name in os.listdir(runs_dir):  # noqa: PTH208  (names alone: ten thousand Paths cost 50 ms)
            if len(name) != KEY_LENGTH:
                continue
            if any(os.path.isfile(f"{runs_dir}/{name}/{file}") for file in _FILES_OF_ANY_RUN):  # noqa: PTH113
                yield name


def _mlflow_run_id(folder: RunFolder) -> Any:
    recorded = (folder.read_json(run_folder.TRACKING) or {}).get("run_id")
    return recorded or (folder.read_json(run_folder.RESULT) or {}).get("mlflow_run_id")


def row(folder: RunFolder) -> RunRow:
    """Return the row of one run. Raises OSError: there is no such folder."""
    result, accepted = None, None
    try:
        result, accepted = acceptance.result_or_accepted(folder)
        altered = altered_target(folder, result) if accepted is None else ""
    except AlteredError as error:
        altered = str(error.what)
    if altered:  # a command that holds the lock is making it again
        return _row_without_result(folder, "" if locks.is_held(folder.lock) else altered)
    if result is None or _is_of_newer_version(folder):
        return _row_without_result(folder)
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
    """Return the first altered target with the reason; '' if all are intact. Raises AlteredError: result.json is.

    ``names``: the targets to check. None is for lists and checks all, but trusts equal size and modification time,
    which a copied folder has too, except for the files by which lists select."""
    if result is None:
        return ""
    try:
        doubted = []  # to be compared by sha256
        for name, expected in result.files.items():
            if names is not None and name not in names:
                continue
            trusts_copy = names is None and name not in _SELECTED_BY
            if not results.is_stamped(f"{folder.path}/{name}", expected, copied=trusts_copy):
                doubted.append((name, expected))
        altered = Stamps(folder.path).first_altered(doubted)
    except DamagedError as error:
        raise folder.altered_error(run_folder.RESULT, str(error)) from error
    except OSError as error:
        return os_reason(error)
    return "" if altered is None else f"{folder.path / altered[0]} {altered[1]}"


def _is_of_newer_version(folder: RunFolder) -> bool:
    """Return True if a newer Paceline wrote key.json, by its first bytes: lists don't have the time to parse it."""
    with (folder.path / run_folder.KEY).open("rb") as file:
        version = re.search(rb'"version": *([^,\s]+)', file.read(256))
    if version is None:  # damaged
        return False
    if version[1].isdigit() and int(version[1]) <= KEY_VERSION:
        return False
    return is_newer(folder.read_json(run_folder.KEY) or {})


def intact_parts(folder: RunFolder) -> Mapping[str, Any]:
    """Return what can be trusted of an altered run: the content of key.json if it gives the run's key, else nothing."""
    try:
        key = folder.read_key()
    except AlteredError:
        return {}
    return {} if key is None else key.parts


def _row_without_result(folder: RunFolder, altered: str = "") -> RunRow:
    """Return the row of a run without a trustworthy result, from its other files. ``altered``: which file was altered;
    the row then shows only what key.json proves."""
    key_parts: Mapping[str, Any] = folder.read_json(run_folder.KEY) or {}
    newer = is_newer(key_parts)
    if altered and not newer:
        key_parts = intact_parts(folder)
    config = key_parts.get("config") if altered else folder.read_json(run_folder.CONFIG)
    config = config if isinstance(config, dict) else {}
    plan, entries = folder.read_json(run_folder.PLAN) or {}, journal.read(folder.journal)
    last = entries[-1] if entries else None
    what, note, error = what_runs(config), "", ""
    if newer:
        state, what = NEWER, "written by a newer Paceline"
    elif altered:
        state, note = ALTERED, f"{altered}; {_AGAIN}"
        what = what if key_parts else "?"
    elif last is None:
        state = State.PLANNED
    elif last.state is State.FINISHED:  # and result.json, which is written last, isn't there yet
        state, note = State.RUNNING, WITHOUT_RESULT
    else:
        state, error = last.state, last.first_line if last.state in _ENDED_BADLY else ""
    return RunRow(
        key=folder.key,
        state=state,
        what=what,
        nodes="?" if altered and not key_parts else _nodes(ranks_of(key_parts, plan)),
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
