"""The verbs for many runs at once: sweep and report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.cli import grids, trials
from pipeline.cli.options import is_on
from pipeline.cli.output import say, say_folded, width
from pipeline.cli.session import ROOT, session
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.runs.index import ALTERED
from pipeline.runs.result import AlteredError

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pathlib import Path

    from pipeline.runs.folder import RunFolder
    from pipeline.sweep.folder import SweepFolder
    from pipeline.sweep.report import TrialResult


def sweep() -> None:
    """Bring every trial of the command line to its end; what is finished already is not run again."""
    options = session().asked.options
    if is_on(options, "dry_run"):
        session().refuse_data()
    if session().searches:
        from pipeline.cli.searching import search

        flags = {name: is_on(options, name) for name in ("fork", "retry_failed", "dry_run")}
        search(session(), **flags)
        return
    if is_on(options, "dry_run"):
        grids.show(session().space, fork=is_on(options, "fork"), retry_failed=is_on(options, "retry_failed"))
        return
    if grids.make_steps(session().space):
        session().forget_pack()
    if grids.fetch_all(session().space):
        session().forget_pack()
    grids.run(
        session().space,
        session().asked.overrides,
        fork=is_on(options, "fork"),
        retry_failed=is_on(options, "retry_failed"),
    )


def run_jobs(jobs: Sequence[tuple[str, ...]], words: Sequence[str]) -> None:
    """The same for combinations that Hydra has made. Raises what ``run`` does, UsageError and DataError."""
    from pipeline.cluster.local_gpus import usable_gpus
    from pipeline.sweep.expand import of_jobs

    space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    if space.trials[0].config.search.name != "none":
        raise UsageError("--multirun expands a grid before anything is asked", hint="doit sweep with the same words")
    if grids.make_steps(space):
        space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    if grids.fetch_all(space):
        space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    grids.run(space, words)


# -------------------------------------------------------------------------------------- the report
def report() -> None:
    """What a sweep's trials have come to, from its folder and the run folders."""
    from pipeline.sweep import folder as folders

    options = session().asked.options
    show(folders.find(session().config.runs_dir, options.get("sweep")), as_json=is_on(options, "json"))


def show(folder: SweepFolder, *, as_json: bool = False) -> None:
    """Its table, on stdout."""
    from pipeline.sweep import report as reporting

    about, results = folder.begun(), results_of(folder)
    if as_json:
        told = reporting.as_json(results, about.total, about.by, about.goals)
        say(json.dumps({"sweep": folder.name, **told}, indent=2))
        return
    say_folded(f"sweep {folder.name}: {' '.join(about.words)}")
    say(reporting.text(results, about.total, about.by, about.goals, width=width()))


def results_of(folder: SweepFolder) -> list[TrialResult]:
    """What its trials have come to so far, those that were not started too."""
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep import folder as folders
    from pipeline.sweep.report import TrialResult

    runs_dir, entries = folder.path.parent.parent, folders.latest(folder.entries()[0])
    results = []
    for trial in folder.begun().trials:
        figures, problem = _figures_or_why(RunFolder(runs_dir / trial.key))
        known = entries.get(trial.key)
        said = trials.said_of(RunFolder(runs_dir / trial.key)) if figures else ""
        state = "FINISHED" if figures else ALTERED if problem else str(known.state) if known is not None else "PLANNED"
        results.append(
            TrialResult(
                number=trial.number,
                key=trial.key,
                state=state,
                chosen=trial.chosen,
                overrides=trial.overrides,
                values=figures,
                detail=problem or said or (known.detail if known is not None and state != "FINISHED" else ""),
            )
        )
    return results


def under_way(runs_dir: Path, newest: RunFolder) -> SweepFolder | None:
    """The sweep that a command runs now, unless another command's run is the newest under way."""
    from pipeline.core import locks
    from pipeline.sweep import folder as folders

    found = [folder for folder in folders.every(runs_dir) if locks.is_held(folder.lock)]
    if not found:
        return None
    keys = {trial.key for trial in found[-1].about().trials}
    return found[-1] if newest.key in keys or not locks.is_held(newest.lock) else None


def standing(folder: SweepFolder) -> str:
    """``sweep 5bb24236b1de: 12 of 40 done, 4 running``."""
    stood = [*{entry.number: entry.state for entry in folder.entries()[0]}.values()]
    running, killed = stood.count(State.RUNNING), stood.count(State.KILLED)
    done = len(stood) - running - killed
    return f"sweep {folder.name}: {done} of {folder.begun().total} done, {running} running"


def _figures_or_why(folder: RunFolder) -> tuple[Mapping[str, float], str]:
    """Of a trial whose result was altered nothing is shown but that; the others keep theirs."""
    try:
        return trials.figures_of(folder), ""
    except AlteredError as error:
        return {}, f"{error.what}; the sweep's command makes it again"
