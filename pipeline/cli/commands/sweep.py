"""`doit sweep`: run the trials of a grid (all combinations of typed values), or those that a search chooses."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from pipeline.cli import terminal
from pipeline.cli.commands.train import refuse_unfit
from pipeline.cli.invocation import Invocation, process_count
from pipeline.cli.output import answer, note, say, wants_json, width
from pipeline.cli.session import ROOT, Session
from pipeline.cli.terminal import start_detached, subscriber
from pipeline.cli.trials import result_of
from pipeline.cluster.validation import usable_gpus
from pipeline.config import compose
from pipeline.core.errors import FATAL, Killed, PacelineError, UsageError, os_reason
from pipeline.core.files import remove_leftovers, write_hint
from pipeline.core.locks import FileLock
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import State
from pipeline.core.tables import aligned, counted
from pipeline.execution.complete import provide_weights
from pipeline.live.notices import Notifier
from pipeline.live.sweep_state import SweepPicture, SweepState
from pipeline.runs.contents import what_runs
from pipeline.sweep import folder as folders
from pipeline.sweep import results as tables
from pipeline.sweep.conduct import Conductor, Sweep
from pipeline.sweep.expand import Grid, Space, fetch, make_step, of_jobs
from pipeline.sweep.folder import SweepFolder, SweepRecord, TrialEntry, in_order, recorded
from pipeline.sweep.results import TrialResult, command, number
from pipeline.sweep.search_plan import STUDY, Objective, SearchPlan, objectives
from pipeline.sweep.trial import Settled, Trial, TrialLines, TrialSource


def sweep(current: Session) -> None:
    """Run every trial of the command line to its end; finished ones are not run again."""
    invocation = current.invocation
    is_dry_run = invocation.is_on("dry_run")
    if is_dry_run:
        current.refuse_unfetchable_data()
    elif invocation.is_on("detach"):
        start_detached(current.config.runs_dir, f"sweep-{time.strftime('%Y%m%d-%H%M%S')}")
        return
    if current.searches:
        show_search(current.search_plan, invocation) if is_dry_run else search(current)
    elif is_dry_run:
        show_trials(current.space, invocation)
    else:
        # data are part of a trial's key, so the trials are computed anew after data were made
        for make in (make_steps, provide):
            if make(current.space.trials):
                current.forget_run()
        run(current.space, invocation)


def run_jobs(jobs: Sequence[tuple[str, ...]], words: Sequence[str]) -> None:
    """Run the combinations (``jobs``) that Hydra has made of the ``words``. Raises PacelineError."""
    space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    if space.trials[0].config.search.name != "none":
        raise UsageError("--multirun expands a grid before anything is asked", hint="doit sweep with the same words")
    for make in (make_steps, provide):
        if make(space.trials):
            space = of_jobs(jobs, root=ROOT, local_gpus=usable_gpus())
    run(space, Invocation(verb="sweep", overrides=tuple(words)))


# ------------------------------------------------------------------------------------------- a grid
def make_steps(trials: Sequence[Trial]) -> bool:
    """Run every missing step that makes a trial's data. Return False if there was none."""
    trials_with_new_data = [trial for trial in trials if make_step(trial.config, note, process_count())]
    return bool(trials_with_new_data)


def provide(trials: Sequence[Trial]) -> bool:
    """Fetch missing data and initial weights of the trials. Return False if nothing was missing."""
    incomplete = [trial.config for trial in trials if trial.run is None]
    for config in incomplete:
        fetch(config, note)
        provide_weights(config, ROOT, argv=sys.argv, say=note)
    return bool(incomplete)


def run(space: Space, invocation: Invocation) -> None:
    """Run the trials of a grid whose data is in place. Raises PacelineError: trials have failed; Killed."""
    if any(trial.run is None for trial in space.trials):
        raise PacelineError("a data set vanished after it was fetched", hint="the same command again")
    for line in dict.fromkeys(text for trial in space.trials for text in trial.config.notes):
        note(line)
    folder = folders.locate(space.trials[0].config.runs_dir, space, fork=invocation.is_on("fork"))
    with lock_of_sweep(folder):
        space = in_order(space, folder.read())
        folder.write(folders.describe(space, space.trials[0].config.shown_words(invocation.overrides)))
        duplicates = f" ({space.duplicates} more were the same run as another)" if space.duplicates else ""
        headline = (
            f"sweep {folder.name}: {counted(len(space.trials), 'trial')}{duplicates}, {_slot_count(space)} at a time"
        )
        ended = run_trials(space, Grid(space.trials), folder, headline, invocation)
    results = _results(ended)
    say(f"\n{tables.text(results, len(results), width=width())}")
    report_end(folder, results, ended)


def _results(ended: Sequence[Settled]) -> list[TrialResult]:
    return [result_of(item) for item in sorted(ended, key=lambda item: item.trial.number)]


def _slot_count(trials: Space | SearchPlan) -> int:
    return max(1, len(trials.slots))


# ------------------------------------------------------------------------------------------- of both kinds
_ENDS = (State.FINISHED, State.PRUNED, State.FAILED)


@contextmanager
def lock_of_sweep(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock, for which a second command waits; add to a ``Killed`` error how to continue."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error
    lock = FileLock(folder.lock)
    if not lock.take():
        note(f"another command is running sweep {folder.name}; waiting for it")
        with WaitReports(note) as reports:
            reports.doing(f"waiting for the command that runs sweep {folder.name}")
            lock.wait()
    try:
        remove_leftovers([folder.path])
        yield
    except OSError as error:
        raise _write_error(folder, error) from error
    except Killed as error:  # Ctrl-C, SIGTERM or --budget
        record, entries = folder.read(), folders.latest(folder.entries()).values()
        done = sum(entry.state is State.FINISHED for entry in entries)
        so_far = (
            f"; {done} of {record.total} trials are finished (doit report {folder.name})" if record.has_begun else ""
        )
        text = f"KILLED sweep {folder.name}: {error}{so_far}"
        raise Killed(text, hint="the same command again; it goes on where this one was") from error
    finally:
        lock.release()


def _write_error(folder: SweepFolder, error: OSError) -> PacelineError:
    """Return the error about a sweep's folder that can't be written."""
    what = f"sweep {folder.name} can't be kept in {folder.path}: {os_reason(error)}"
    return PacelineError(what, hint=write_hint(error, folder.path.parent.parent))


def run_trials(
    trials: Space | SearchPlan, source: TrialSource, folder: SweepFolder, headline: str, invocation: Invocation
) -> list[Settled]:
    """Run the trials of a grid or a search to their end, with output on the terminal. Raises Killed."""
    if any(slot.spares for slot in trials.slots):
        note("cluster.spares: a sweep takes none; a trial that loses its hosts is tried again on those that are left")
    first = (trials.representative_trial if isinstance(trials, SearchPlan) else trials.trials[0]).config
    refuse_unfit(first.cluster)
    metric, maximize = tables.DEFAULT_METRIC, True  # by which the view marks the best trial
    if isinstance(trials, SearchPlan):
        goal = objectives(trials.config)[0]
        metric, maximize = goal.metric, goal.direction == "maximize"
    state = SweepState(
        name=folder.name, total=source.total, at_once=_slot_count(trials), metric=metric, maximize=maximize
    )
    name = f"{counted(source.total, 'trial')} of {what_runs(first.resolved)}"
    with (
        terminal.screen(lambda: SweepPicture(state, folder.path.parent.parent), of_trials=True) as screen,
        Notifier(first.notify, screen.say, kind="sweep", key=folder.name, name=name) as notices,
    ):
        screen.say(headline)
        sweep = Sweep(
            source=source, folder=folder, key=trials.key, slots=trials.slots, root=ROOT, argv=sys.argv,
            retries=trials.settings.retries, retry_failed=invocation.is_on("retry_failed"),
            max_trials=invocation.numbers("max_trials").get("max_trials"), say=screen.say, is_live=screen.is_live,
            on_event=subscriber(screen, notices.on_event, TrialLines(source.total, metric).line),
        )  # fmt: skip
        ended = Conductor(sweep).run()
        failed = [item for item in ended if item.outcome.state is State.FAILED]
        counts = {f"trials_{end.lower()}": float(sum(item.outcome.state is end for item in ended)) for end in _ENDS}
        error = f"{len(failed)} of {len(ended)} trials failed: {failed[0].outcome.detail}" if failed else ""
        notices.ended(counts, error)
    return ended


def report_end(folder: SweepFolder, results: Sequence[TrialResult], ended: Sequence[Settled]) -> None:
    """Print the last lines of a sweep after its table. Raises PacelineError: trials have failed."""
    counts = {state: sum(item.state == state for item in results) for state in State}
    shown = [f"{counts[state]} {state.lower()}" for state in _ENDS if counts[state] or state is not State.PRUNED]
    elsewhere = sum(item.outcome.elsewhere for item in ended)  # trials that another command ran meanwhile
    started = sum(not item.was_known for item in ended) - elsewhere
    others = f", {elsewhere} by another command meanwhile" if elsewhere else ""
    say(f"\nsweep {folder.name}: {', '.join(shown)}; {started} run just now{others}")
    record = folder.read_begun() if wants_json() else folder.read()
    # with --max-trials some are left for the next command
    done = {entry.key for entry in folder.entries() if entry.state in _ENDS}
    if remaining := record.total - sum(trial.key in done for trial in record.trials):
        say(f"  left     {counted(remaining, 'trial')} of {record.total}; the same command goes on with them")
    say(f"  report   doit report {folder.name}\n  compare  doit ui")
    failed, error = [item for item in results if item.state == State.FAILED], None
    if failed:
        error = PacelineError(
            f"{len(failed)} of {len(results)} trials failed (the table above names them), the first, "
            f"trial {failed[0].number}: {failed[0].detail}",
            hint="fix it, then the same command with --retry-failed (finished trials are not run again)",
        )
    if wants_json():
        table = tables.as_json(results, record.total, record.by, record.goals)
        answer({"sweep": folder.name, "left": remaining, **table}, error=error)
    if error is not None:
        raise error


# ------------------------------------------------------------------------------------------- a dry run
def show_trials(space: Space, invocation: Invocation) -> None:
    """Print whether each trial is done or would run, and why. Writes nothing."""
    entries: dict[str, TrialEntry] = {}
    name = "(its data isn't fetched, so it has no key yet)"
    if space.key:
        folder = folders.locate(space.trials[0].config.runs_dir, space, fork=invocation.is_on("fork"))
        space, name = in_order(space, folder.read()), folder.name
        entries = folders.latest(folder.entries())
    rows, done = [("trial", "key", "", "why", "what")], 0
    for trial in space.trials:
        state, why = trial_state(trial, entries, invocation.is_on("retry_failed"))
        rows.append((str(trial.number), trial.key or "-", state, why, " ".join(trial.chosen)))
        done += state == "done"
    say(f"sweep {name}: {counted(len(space.trials), 'trial')}, {done} done, {_slot_count(space)} at a time")
    say(aligned(rows))


def trial_state(trial: Trial, entries: Mapping[str, TrialEntry], retry_failed: bool) -> tuple[str, str]:
    """Return ``done``, ``to run`` or ``failed``, and why; ``entries``: key → last entry in the sweep's journal."""
    if trial.run is None:
        step = trial.config.step
        missing = "its data, or what it starts from, isn't here"
        return "to run", missing if step is None or step.path else f"step {step.name} isn't made"
    try:
        reason = trial.run.reason
    except UsageError as error:  # a newer Paceline wrote its folder
        return "failed", error.what
    if reason is None:
        return "done", str(trial.run.accepted or "")
    entry = entries.get(trial.run.key.short)
    # an error in the code would come again, unlike a lost host
    if entry is not None and entry.state is State.FAILED and entry.cause in FATAL and not retry_failed:
        return "failed", f"{entry.detail} (--retry-failed tries again)"
    if entry is not None and entry.state is not State.FINISHED:
        return "to run", f"{entry.state} before: {entry.detail}" if entry.detail else f"{entry.state} before"
    return "to run", reason


# ------------------------------------------------------------------------------------------- a search
def search(current: Session) -> None:
    """Run the trials that the search chooses, up to its total. Raises PacelineError: trials have failed; Killed."""
    from pipeline.sweep.search import SearchSource, open_study  # optuna (0.3 s), which a grid does without

    for make in (make_steps, provide):
        if make([current.search_plan.representative_trial]):
            current.forget_run()
    plan = current.search_plan
    folder = _search_folder(plan, current.invocation)
    with compose.hydra_ready(), lock_of_sweep(folder):
        study = open_study(plan.config, plan.space, folder.path, plan.made_of, epochs=plan.epochs)
        goals = objectives(plan.config)
        directions = {goal.metric: goal.direction for goal in goals}
        record = SweepRecord(
            key=plan.key, configurations=plan.key, total=study.total,
            words=plan.representative_trial.config.shown_words(current.invocation.overrides),
            at_once=_slot_count(plan), by=goals[0].metric, goals=directions,
        )  # fmt: skip
        pruner = "" if plan.config.pruner == "none" else f", pruner {plan.config.pruner}"
        headline = (
            f"sweep {folder.name}: search={plan.config.name}, {study.total} trials of which {study.begun} have begun, "
            f"{_slot_count(plan)} at a time{pruner}"
        )
        source = SearchSource(study, plan, partial(_record_trial, folder, record), note)
        ended = run_trials(plan, source, folder, headline, current.invocation)
        results = _results(ended)
        by = goals[0].metric if len(goals) == 1 else None
        say(f"\n{tables.text(results, study.total, by, directions, width=width())}")
        if by is None:
            say(f"\n{_text_of_best(goals, [item for item in results if item.number in study.best()])}")
        report_end(folder, results, ended)


def _search_folder(plan: SearchPlan, invocation: Invocation) -> SweepFolder:
    """Return the sweep folder, named by ``sweep.name`` or the search's key. Raises UsageError: a grid has that name."""
    runs_dir = plan.representative_trial.config.runs_dir
    folder = folders.folder_for(runs_dir, plan.settings.name, plan.key, plan.key, fork=invocation.is_on("fork"))
    if plan.settings.name and folder.read().has_begun and not (folder.path / STUDY).exists():
        raise UsageError(
            f"sweep.name={folder.name} stands for a grid, and this is a search", hint="another sweep.name, or --fork"
        )
    return folder


def _record_trial(folder: SweepFolder, record: SweepRecord, trial: Trial) -> None:
    """Add a trial to sweep.json before it starts, so that a report shows it even after a crash."""
    recorded_trials = folder.read().trials
    if not any((item.number, item.key) == (trial.number, trial.key) for item in recorded_trials):
        others = (item for item in recorded_trials if item.number != trial.number)
        folder.write(replace(record, trials=(*others, recorded(trial))))


def _text_of_best(goals: Sequence[Objective], results: Sequence[TrialResult]) -> str:
    """Return the table of the best trials of several objectives: those to which no other is superior in all of them."""
    rows = [("trial", *(goal.metric for goal in goals), "")]
    for item in results:
        cells = (number(item.values[goal.metric]) if goal.metric in item.values else "-" for goal in goals)
        rows.append((str(item.number), *cells, command(item.overrides)))
    names = ", ".join(f"{goal.metric} ({goal.direction})" for goal in goals)
    return f"no other trial is better in all of {names}:\n{aligned(rows)}"


def show_search(plan: SearchPlan, invocation: Invocation) -> None:
    """Print the trials chosen so far; the next ones depend on their results. Writes nothing."""
    folder = _search_folder(plan, invocation)
    chosen_trials, entries = folder.read().trials, folders.latest(folder.entries())
    rows = [("trial", "key", "state", "what")]
    for item in sorted(chosen_trials, key=lambda item: item.number):
        entry = entries.get(item.key)
        rows.append((str(item.number), item.key, str(entry.state) if entry else "asked", " ".join(item.chosen)))
    total = plan.total
    has_name = plan.representative_trial.run or plan.settings.name  # else it is named by its key, which needs the data
    name = folder.name if has_name else "(its data isn't fetched, so it has no key yet)"
    say(f"sweep {name}: search={plan.config.name}, {total} trials, {len(chosen_trials)} of them asked for so far")
    if chosen_trials:
        say(aligned(rows))
    say(f"{total - len(chosen_trials)} more are chosen as it goes, from:")
    say("\n".join(f"  {name}  {item}" for name, item in plan.space.described().items()))
