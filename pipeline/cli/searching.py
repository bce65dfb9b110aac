"""`doit sweep search=…`: a sweep whose trials are chosen as it goes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.cli import trials
from pipeline.cli.output import note, say, width
from pipeline.cli.session import ROOT, Session
from pipeline.core.errors import UsageError

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pipeline.sweep.folder import SweepFolder
    from pipeline.sweep.report import TrialResult
    from pipeline.sweep.schedule import Ended
    from pipeline.sweep.search import Search
    from pipeline.sweep.search_source import SearchPlan
    from pipeline.sweep.trial import Trial


def search(current: Session, *, fork: bool, retry_failed: bool, dry_run: bool) -> None:
    """Ask for trials and train them until the fixed total is reached.

    Raises:
        PacelineError: trials have failed; the text names each with its first error line.
        Killed: stopped by Ctrl-C or a signal.
    """
    from pipeline.config import compose
    from pipeline.execution.bringing import bring
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
        from pipeline.sweep.search_rules import objectives
        from pipeline.sweep.sweep_file import SweepRecord

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
    from pipeline.sweep.search_rules import objectives

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
