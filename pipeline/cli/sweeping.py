"""The verbs for many runs at once: sweep and report."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.cli import trials
from pipeline.cli.invocation import at_once, is_on
from pipeline.cli.output import note, say, say_folded, width
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.core.errors import DECIDED, PacelineError, UsageError
from pipeline.core.specs import State
from pipeline.runs.index import ALTERED
from pipeline.runs.result import AlteredError

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pathlib import Path

    from pipeline.runs.folder import RunFolder
    from pipeline.sweep.expand import Space
    from pipeline.sweep.folder import SweepFolder, TrialEntry
    from pipeline.sweep.report import TrialResult
    from pipeline.sweep.schedule import Ended
    from pipeline.sweep.search import Search
    from pipeline.sweep.search_source import SearchPlan
    from pipeline.sweep.trial import Trial


def make_steps(space: Space) -> bool:
    """Every step that a trial's data comes from and that isn't made yet. False: all were, so the space stands."""
    made = 0
    for trial in space.trials:
        if trial.run is None and trial.config.step is not None:
            made += trial.config.step.make(note, at_once())
    return made > 0


def fetch_all(space: Space) -> bool:
    """Every data set that a trial needs and that isn't there yet, and the weights that it starts from.

    False: all trials had theirs, so the space stands.
    """
    from pipeline.data import store
    from pipeline.execution.complete import bring

    for trial in space.trials:
        if trial.run is None and store.find(trial.config.train.dataset, trial.config.data_dir) is None:
            pack = store.fetch(trial.config.train.dataset, trial.config.data_dir)
            note(f"{pack.manifest.name}: {pack.manifest.count:,} images in {relative(pack.path)}")
        if trial.run is None:
            bring(trial.config, ROOT, argv=sys.argv, say=note)
    return any(trial.run is None for trial in space.trials)


def run(space: Space, words: Sequence[str], *, fork: bool = False, retry_failed: bool = False) -> None:
    """Run the trials of a space whose data is in place.

    Raises:
        PacelineError: trials have failed; the text names each with its first error line.
        Killed: stopped by Ctrl-C or a signal.
    """
    from pipeline.sweep import folder as folders
    from pipeline.sweep import report as reporting
    from pipeline.sweep.expand import Grid
    from pipeline.sweep.folder import in_order

    if any(trial.run is None for trial in space.trials):
        raise PacelineError("a data set vanished after it was fetched", hint="the same command again")
    for line in dict.fromkeys(text for trial in space.trials for text in trial.config.notes):
        note(line)
    folder = folders.locate(space.trials[0].config.runs_dir, space, fork=fork)
    with trials.alone(folder):
        space = in_order(space, folder.about())
        folder.begin(folders.describe(space, space.trials[0].config.shown_words(words)))
        ended = trials.conducted(space, Grid(space.trials), folder, _headline(space, folder), retry_failed=retry_failed)
    results = [trials.result_of(item) for item in sorted(ended, key=lambda item: item.trial.number)]
    say(f"\n{reporting.text(results, len(results), width=width())}")
    trials.conclude(folder, results, ended)


def _headline(space: Space, folder: SweepFolder) -> str:
    duplicates = f" ({space.duplicates} more were the same run as another)" if space.duplicates else ""
    return f"sweep {folder.name}: {len(space.trials)} trials{duplicates}, {max(1, len(space.slots))} at a time"


# ---------------------------------------------------------------------------------- what would run
def show_trials(space: Space, *, fork: bool, retry_failed: bool) -> None:
    """Each trial: done, to run, and why. Writes nothing."""
    from pipeline.core.tables import aligned
    from pipeline.sweep import folder as folders
    from pipeline.sweep.folder import in_order

    entries: dict[str, TrialEntry] = {}
    name = "(its data isn't fetched, so it has no key yet)"
    if space.key:
        folder = folders.locate(space.trials[0].config.runs_dir, space, fork=fork)
        space, name = in_order(space, folder.about()), folder.name
        entries = folders.latest(folder.entries()[0])
    rows = [("trial", "key", "", "why", "what")]
    rows += [
        (str(trial.number), trial.key or "-", *trial_standing(trial, entries, retry_failed), " ".join(trial.chosen))
        for trial in space.trials
    ]
    done = sum(row[2] == "done" for row in rows)
    say(f"sweep {name}: {len(space.trials)} trials, {done} done, {max(1, len(space.slots))} at a time")
    say(aligned(rows))


def trial_standing(trial: Trial, entries: Mapping[str, TrialEntry], retry_failed: bool) -> tuple[str, str]:
    """``done``, ``to run`` or ``failed``, and why."""
    if trial.run is None:
        step = trial.config.step
        waits = "its data, or what it starts from, isn't here"
        return "to run", waits if step is None or step.path else f"step {step.name} isn't made"
    try:
        reason = trial.run.reason
    except UsageError as error:  # a newer Paceline wrote its folder
        return "failed", error.what
    if reason is None:
        return "done", str(trial.run.accepted or "")
    known = entries.get(trial.run.key.short)
    if known is not None and known.state is State.FAILED and known.cause in DECIDED and not retry_failed:
        return "failed", f"{known.detail} (retry_failed=1 tries again)"
    if known is not None and known.state is not State.FINISHED:
        return "to run", f"{known.state} before: {known.detail}" if known.detail else f"{known.state} before"
    return "to run", reason


def search(current: Session, *, fork: bool, retry_failed: bool, dry_run: bool) -> None:
    """Ask for trials and train them until the fixed total is reached.

    Raises:
        PacelineError: trials have failed; the text names each with its first error line.
        Killed: stopped by Ctrl-C or a signal.
    """
    from pipeline.config import compose
    from pipeline.execution.complete import bring
    from pipeline.sweep.search_source import fetch, make_step

    if dry_run:
        _show(current.search_plan, _folder(current.search_plan, fork))
        return
    if make_step(current.search_plan.representative_trial.config, note):
        current.forget_pack()
    fetch(current.search_plan.representative_trial.config)
    bring(current.search_plan.representative_trial.config, ROOT, argv=sys.argv, say=note)
    current.forget_pack()
    with compose.hydra_ready():
        _run(current.search_plan, current.asked.overrides, fork=fork, retry_failed=retry_failed)


def _run(plan: SearchPlan, words: Sequence[str], *, fork: bool, retry_failed: bool) -> None:
    from pipeline.sweep.search import open_search
    from pipeline.sweep.search_source import Searching

    folder = _folder(plan, fork)
    with trials.alone(folder):
        study = open_search(plan.config, plan.space, folder.path, plan.made_of, epochs=plan.epochs)
        asked = _Asked(plan, folder, words, study.total)
        settings = plan.config
        pruner = "" if settings.pruner == "none" else f", pruner {settings.pruner}"
        headline = (
            f"sweep {folder.name}: search={settings.name}, {study.total} trials of which {study.begun} have begun, "
            f"{max(1, len(plan.slots))} at a time{pruner}"
        )
        source = Searching(study, plan, asked.note, note)
        ended = trials.conducted(plan, source, folder, headline, retry_failed=retry_failed)
        _conclude(plan, study, folder, ended)


def _folder(plan: SearchPlan, fork: bool) -> SweepFolder:
    """Under the search's key, or under ``sweep.name``. Raises UsageError: that name is a grid's."""
    from pipeline.sweep import folder as folders
    from pipeline.sweep.search import FILE

    if plan.settings.name is None:
        return folders.SweepFolder(plan.runs_dir / folders.FOLDER / plan.key)
    folder = base = folders.named(plan.runs_dir, plan.settings.name)
    number = 1
    while fork and (about := folder.about()).has_begun and about.configurations != plan.key:
        number += 1
        folder = folders.SweepFolder(base.path.with_name(f"{base.name}-{number}"))
    if folder.about().has_begun and not (folder.path / FILE).exists():
        raise UsageError(
            f"sweep.name={folder.name} stands for a grid, and this is a search",
            hint="another sweep.name, or fork=1",
        )
    return folder


class _Asked:
    """sweep.json of a search: its trials in the order in which they were asked for."""

    def __init__(self, plan: SearchPlan, folder: SweepFolder, words: Sequence[str], total: int) -> None:
        from pipeline.sweep.folder import SweepRecord
        from pipeline.sweep.search_source import objectives

        goals = objectives(plan.config)
        self._folder = folder
        self._about = SweepRecord(
            key=plan.key,
            configurations=plan.key,
            words=plan.representative_trial.config.shown_words(words),
            total=total,
            trials=folder.about().trials,
            at_once=max(1, len(plan.slots)),
            by=goals[0].metric,
            goals={goal.metric: goal.direction for goal in goals},
        )

    def note(self, trial: Trial) -> None:
        """Before the trial starts: what a report is made of, also after a crash."""
        from pipeline.sweep.folder import recorded

        if any((item.number, item.key) == (trial.number, trial.key) for item in self._about.trials):
            return
        others = (item for item in self._about.trials if item.number != trial.number)
        self._about = dataclasses.replace(self._about, trials=(*others, recorded(trial)))
        self._folder.begin(self._about)


def _conclude(plan: SearchPlan, study: Search, folder: SweepFolder, ended: Sequence[Ended]) -> None:
    """The table, the best, and what failed as the error."""
    from pipeline.sweep import report as reporting
    from pipeline.sweep.search_source import objectives

    goals = objectives(plan.config)
    results = [trials.result_of(item) for item in sorted(ended, key=lambda item: item.trial.number)]
    by, directions = goals[0].metric if len(goals) == 1 else None, {goal.metric: goal.direction for goal in goals}
    say(f"\n{reporting.text(results, study.total, by, directions, width=width())}")
    if len(goals) > 1:
        say(f"\nno other trial is better in all of {', '.join(f'{goal.metric} ({goal.direction})' for goal in goals)}:")
        say(_front([item for item in results if item.number in study.best()], [goal.metric for goal in goals]))
    trials.conclude(folder, results, ended)


def _front(results: Sequence[TrialResult], metrics: Sequence[str]) -> str:
    from pipeline.core.tables import aligned
    from pipeline.sweep.report import command, figure

    rows = [("trial", *metrics, "")]
    for item in results:
        cells = (figure(item.values[name]) if name in item.values else "-" for name in metrics)
        rows.append((str(item.number), *cells, command(item.overrides)))
    return aligned(rows)


def _show(plan: SearchPlan, folder: SweepFolder) -> None:
    """What was asked for so far and how it stands; what comes next depends on what they find. Writes nothing."""
    from pipeline.core.tables import aligned
    from pipeline.sweep import folder as folders

    known, entries = folder.about().trials, folders.latest(folder.entries()[0])
    rows = [("trial", "key", "state", "what")]
    for item in sorted(known, key=lambda item: item.number):
        entry = entries.get(item.key)
        rows.append((str(item.number), item.key, str(entry.state) if entry else "asked", " ".join(item.chosen)))
    total = plan.total
    known_name = plan.representative_trial.run or plan.settings.name
    name = folder.name if known_name else "(its data isn't fetched, so it has no key yet)"
    say(f"sweep {name}: search={plan.config.name}, {total} trials, {len(known)} of them asked for so far")
    if known:
        say(aligned(rows))
    say(f"{total - len(known)} more are chosen as it goes, from:")
    say("\n".join(f"  {name}  {item}" for name, item in plan.space.described().items()))


def sweep() -> None:
    """Bring every trial of the command line to its end; what is finished already is not run again."""
    options = session().asked.options
    if is_on(options, "dry_run"):
        session().refuse_data()
    if session().searches:
        flags = {name: is_on(options, name) for name in ("fork", "retry_failed", "dry_run")}
        search(session(), **flags)
        return
    if is_on(options, "dry_run"):
        show_trials(session().space, fork=is_on(options, "fork"), retry_failed=is_on(options, "retry_failed"))
        return
    if make_steps(session().space):
        session().forget_pack()
    if fetch_all(session().space):
        session().forget_pack()
    run(
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
    if make_steps(space):
        space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    if fetch_all(space):
        space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    run(space, words)


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
