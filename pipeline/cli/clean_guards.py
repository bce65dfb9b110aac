"""What `doit clean` never removes, whatever its words are: runs under way, and the last copy of a result in use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.core import locks
from pipeline.core.specs import UNDER_WAY
from pipeline.runs import acceptance, index
from pipeline.runs.disk_usage import measured
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import Row
from pipeline.runs.removal import IN_USE
from pipeline.sweep.folder import FOLDER, SweepFolder
from pipeline.tracking import state as tracking_state
from trainers.contract import run_folder

_QUIET_S = 86_400.0


def needed(runs_dir: Path) -> dict[str, str]:
    """Key → who needs the run's result, in words. Raises UsageError: a sweep's folder can't be read."""
    starts = {key: f"run {of}, which isn't finished, starts from its weights" for key, of in _starts(runs_dir).items()}
    return {**starts, **{key: f"the sweep {name} names its result" for key, name in _sweeps(runs_dir).items()}}


def _sweeps(runs_dir: Path) -> dict[str, str]:
    """Key → a sweep that has the run among its trials."""
    named: dict[str, str] = {}
    for path in sorted((runs_dir / FOLDER).glob("*/sweep.json")):
        sweep = SweepFolder(path.parent)
        named |= dict.fromkeys((trial.key for trial in sweep.begun().trials), sweep.name)
        named |= dict.fromkeys((entry.key for entry in sweep.entries()[0]), sweep.name)
    return named


def _starts(runs_dir: Path) -> dict[str, str]:
    """Key → a run that isn't finished and starts from its weights."""
    named: dict[str, str] = {}
    for path in sorted(runs_dir.glob(f"*/{run_folder.INITIAL_WEIGHTS_NOTES}")):
        folder = RunFolder(path.parent)
        run = (folder.read_json(run_folder.INITIAL_WEIGHTS_NOTES) or {}).get("run")
        if run and not folder.result.exists():
            named[str(run)] = folder.key
    return named


def in_use(folder: RunFolder) -> str:
    """That a command of this computer works on the run, or ''."""
    return IN_USE if locks.is_held(folder.lock) else ""


def objection(folder: RunFolder, row: Row, needs: Mapping[str, str], *, result_stays: bool) -> str:
    """Why the run has to stay; '' where nothing speaks against its removal.

    Args:
        row: the run as a list shows it.
        needs: what ``needed`` has found.
        result_stays: only checkpoints go.
    """
    if folder.path.is_symlink():
        return "a symbolic link stands in its place"
    if row.state == index.NEWER:
        return "a newer Paceline wrote it"
    if row.state == index.ACCEPTED:
        return "it is a person's word, which doit accept undo=1 takes back"
    if row.state in UNDER_WAY and time.time() - measured(folder.path).newest < _QUIET_S:
        return "it hasn't ended, and was written to within a day: another computer may be at work on it"
    if result_stays or not folder.result.exists():
        return ""
    if row.key in needs:
        return needs[row.key]
    if held := acceptance.accepted_for(folder.path):
        return f"its result was accepted for {', '.join(held)}"
    missing = [name or "MLflow" for name in _asked(folder) if not _recorded(folder, name)]
    return f"{' and '.join(missing)} hasn't all of it yet: doit record run=KEY" if missing else ""


def _asked(folder: RunFolder) -> list[str | None]:
    """The trackers that the run was to be recorded in; None: MLflow."""
    told = (folder.path / run_folder.TRACKING).exists()
    mlflow = told or (folder.read_json(run_folder.RESULT) or {}).get("mlflow_run_id") is not None
    return [*([None] if mlflow else []), *tracking_state.trackers_of(folder.path)]


def _recorded(folder: RunFolder, tracker: str | None) -> bool:
    known = tracking_state.load(folder.path, tracker)
    done = known is not None and known.state == tracking_state.DONE
    return known is not None and done and known.inputs == tracking_state.fingerprints(folder.path)
