"""A grid of trials: what would run, and running it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.cli import trials
from pipeline.cli.options import at_once
from pipeline.cli.output import note, say, width
from pipeline.cli.session import ROOT, relative
from pipeline.core.errors import DECIDED, PacelineError, UsageError
from pipeline.core.specs import State

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pipeline.sweep import Space, Trial
    from pipeline.sweep.folder import SweepFolder, TrialEntry


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
    from pipeline.execution.bringing import bring

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
    from pipeline.sweep.grid import Grid, in_order

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
def show(space: Space, *, fork: bool, retry_failed: bool) -> None:
    """Each trial: done, to run, and why. Writes nothing."""
    from pipeline.core.tables import aligned
    from pipeline.sweep import folder as folders
    from pipeline.sweep.grid import in_order

    entries: dict[str, TrialEntry] = {}
    name = "(its data isn't fetched, so it has no key yet)"
    if space.key:
        folder = folders.locate(space.trials[0].config.runs_dir, space, fork=fork)
        space, name = in_order(space, folder.about()), folder.name
        entries = folders.latest(folder.entries()[0])
    rows = [("trial", "key", "", "why", "what")]
    rows += [
        (str(trial.number), trial.key or "-", *standing(trial, entries, retry_failed), " ".join(trial.chosen))
        for trial in space.trials
    ]
    done = sum(row[2] == "done" for row in rows)
    say(f"sweep {name}: {len(space.trials)} trials, {done} done, {max(1, len(space.slots))} at a time")
    say(aligned(rows))


def standing(trial: Trial, entries: Mapping[str, TrialEntry], retry_failed: bool) -> tuple[str, str]:
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
