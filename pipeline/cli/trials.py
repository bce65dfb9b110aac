"""The results of a sweep's trials, read from its folder and the run folders, for the verbs that show a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.cli.output import answer, say, wants_json, width
from pipeline.cli.session import Session
from pipeline.core import locks
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.runs import acceptance, index
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import ALTERED
from pipeline.runs.result import AlteredError, nonfinite_note
from pipeline.sweep import folder as folders
from pipeline.sweep import results as tables
from pipeline.sweep.folder import SweepFolder
from pipeline.sweep.results import TrialResult
from pipeline.sweep.trial import Settled


def with_sweep(current: Session) -> Session:
    """Move a bare argument that names a sweep to the option ``sweep=``. Raises UsageError: there are several."""
    arguments, options = current.invocation.arguments, current.invocation.options
    sweeps = [word for word in arguments if names_sweep(current.config.runs_dir, word)]
    if not sweeps:
        return current
    all_sweeps = [*sweeps, *([options["sweep"]] if "sweep" in options else [])]
    if len(all_sweeps) > 1:
        raise UsageError(f"one sweep, not {' and '.join(all_sweeps)}", hint=f"doit {current.invocation.verb} KEY …")
    keys = tuple(word for word in arguments if word not in sweeps)
    current.invocation = current.invocation._replace(arguments=keys, options={**options, "sweep": sweeps[0]})
    return current


def names_sweep(runs_dir: Path, word: str) -> bool:
    """Whether a bare argument is the beginning of a sweep's name, and not of a run's key."""
    return not index.names_run(runs_dir, word) and bool(folders.beginning_with(folders.all_sweeps(runs_dir), word))


def show(folder: SweepFolder) -> None:
    """Print a sweep's table."""
    record, results = folder.read_begun(), results_of(folder)
    if wants_json():
        table = tables.as_json(results, record.total, record.by, record.goals)
        answer({"sweep": folder.name, **table})
        return
    say(f"sweep {folder.name}: {' '.join(record.words)}", folds=True)
    say(tables.text(results, record.total, record.by, record.goals, width=width()))


def results_of(folder: SweepFolder) -> list[TrialResult]:
    """Return the results of all trials of a sweep, including those that have not started."""
    runs_dir, entries = folder.path.parent.parent, folders.latest(folder.entries())
    results = []
    for trial in folder.read_begun().trials:
        entry, problem = entries.get(trial.key), ""
        try:
            figures, remark = _figures_and_remark(RunFolder(runs_dir / trial.key))
        except AlteredError as error:  # one damaged result must not hide the other trials
            figures, remark, problem = {}, "", f"{error.what}; the sweep's command makes it again"
        # the run folder counts more than the sweep's journal: another command may have finished the run since
        if figures:
            state = "FINISHED"
        elif problem:
            state = ALTERED
        else:
            state = "PLANNED" if entry is None else str(entry.state)
        results.append(
            TrialResult(
                number=trial.number,
                key=trial.key,
                state=state,
                chosen=trial.chosen,
                overrides=trial.overrides,
                values=figures,
                detail=problem or remark or (entry.detail if entry is not None and not figures else ""),
            )
        )
    return results


def sweep_in_progress(runs_dir: Path, newest: RunFolder) -> SweepFolder | None:
    """Return the sweep that a command runs now, unless a run of another command is newer."""
    running = [folder for folder in folders.all_sweeps(runs_dir) if locks.is_held(folder.lock)]
    if not running:
        return None
    keys = {trial.key for trial in running[-1].read().trials}
    return running[-1] if newest.key in keys or not locks.is_held(newest.lock) else None


def progress_line(folder: SweepFolder) -> str:
    """Return ``sweep 5bb24236b1de: 12 of 40 done, 4 running``."""
    states = [*{entry.number: entry.state for entry in folder.entries()}.values()]
    running, killed = states.count(State.RUNNING), states.count(State.KILLED)
    done = len(states) - running - killed
    return f"sweep {folder.name}: {done} of {folder.read_begun().total} done, {running} running"


def result_of(item: Settled) -> TrialResult:
    """Return the result of a trial that this command has just ended. Raises AlteredError."""
    trial, state = item.trial, item.outcome.state
    folder = trial.run.folder if trial.run is not None and state is State.FINISHED else None
    figures, remark = _figures_and_remark(folder) if folder else ({}, "")
    return TrialResult(
        number=trial.number,
        key=trial.key or "",
        state=str(state),
        chosen=trial.chosen,
        overrides=trial.overrides,
        values=figures,
        detail=remark or item.outcome.detail,
    )


def _figures_and_remark(folder: RunFolder) -> tuple[Mapping[str, float], str]:
    """Return the metrics and speeds of a finished run, and a remark; ({}, "") while there is no result.

    The remark says that the result was accepted, or that a metric is NaN or infinite. Raises AlteredError.
    """
    result, accepted = acceptance.result_or_accepted(folder)
    if result is None:
        return {}, ""
    speeds = {"images_per_s": result.images_per_s, "train_s": result.train_s}
    figures = {**result.metrics, **{name: value for name, value in speeds.items() if value is not None}}
    return figures, nonfinite_note(result.fields) if accepted is None else str(accepted)
