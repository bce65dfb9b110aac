"""The verbs for many runs at once: sweep and report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import ROOT, relative, session
from pipeline.core import leftovers
from pipeline.core.errors import Killed, PacelineError, UsageError, os_reason
from pipeline.core.heartbeat import Heartbeat
from pipeline.core.specs import State
from pipeline.runs import misplaced
from pipeline.runs.index import ALTERED
from pipeline.runs.result import AlteredError

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep import Space, Trial
    from pipeline.sweep.folder import SweepFolder, TrialEntry
    from pipeline.sweep.report import TrialResult
    from pipeline.sweep.schedule import Ended
    from pipeline.sweep.search_source import SearchPlan
    from pipeline.sweep.trial import TrialSource


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
        _show(session().space, fork=is_on(options, "fork"), retry_failed=is_on(options, "retry_failed"))
        return
    fetch_all(session().space)
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
    fetch_all(space)
    run(of_jobs(jobs, root=ROOT, local_gpus=usable_gpus()), words)


def fetch_all(space: Space) -> None:
    """Every data set that a trial needs and that isn't there yet."""
    from pipeline import data

    for trial in space.trials:
        if trial.run is None and data.find(trial.config.train.dataset, trial.config.data_dir) is None:
            pack = data.fetch(trial.config.train.dataset, trial.config.data_dir)
            say(f"{pack.manifest.name}: {pack.manifest.count:,} images in {relative(pack.path)}")


def run(space: Space, words: Sequence[str], *, fork: bool = False, retry_failed: bool = False) -> None:
    """Run the trials of a space whose data is in place.

    Raises:
        PacelineError: trials have failed; the text names each with its first error line.
        Killed: stopped by Ctrl-C or a signal.
    """
    from pipeline.sweep import folder as folders
    from pipeline.sweep.grid import Grid, in_order

    if any(trial.run is None for trial in space.trials):
        raise PacelineError("a data set vanished after it was fetched", hint="the same command again")
    folder = folders.locate(space.trials[0].config.runs_dir, space, fork=fork)
    with alone(folder):
        space = in_order(space, folder.about())
        folder.begin(folders.describe(space, space.trials[0].config.shown_words(words)))
        say(_headline(space, folder))
        ended = conducted(space, Grid(space.trials), folder, retry_failed=retry_failed)
    _conclude(space, folder, ended)


def conducted(what: Space | SearchPlan, source: TrialSource, folder: SweepFolder, *, retry_failed: bool) -> list[Ended]:
    """Run the trials of a grid or a search to their end, talking to the terminal. Raises Killed."""
    from pipeline.sweep.conduct import Sweep, conduct

    return conduct(
        Sweep(
            source=source,
            folder=folder,
            key=what.key,
            slots=what.slots,
            retries=what.settings.retries,
            retry_failed=retry_failed,
            root=ROOT,
            argv=sys.argv,
            say=say,
        )
    )


@contextmanager
def alone(folder: SweepFolder) -> Iterator[None]:
    """The only command to run this sweep; a second one waits. A Killed that comes out says how to go on."""
    from filelock import FileLock, Timeout

    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_keep(folder, error) from error
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another command is running sweep {folder.name}; waiting for it")
        with Heartbeat(say) as heartbeat:
            heartbeat.doing(f"waiting for the command that runs sweep {folder.name}")
            lock.acquire(poll_interval=0.2)
    try:
        leftovers.remove([folder.path])
        for line in misplaced.set_aside(folder.path):
            say(line)
        yield
    except OSError as error:
        raise _cannot_keep(folder, error) from error
    except Killed as error:
        text = f"KILLED sweep {folder.name}: {error}"
        raise Killed(text, hint="the same command again; it goes on where this one was") from error
    finally:
        lock.release()


def _cannot_keep(folder: SweepFolder, error: OSError) -> PacelineError:
    what = f"sweep {folder.name} can't be kept in {folder.path}: {os_reason(error)}"
    return PacelineError(
        what, hint="make room or fix its permissions, then the same command; or paths.runs=<another folder>"
    )


def _headline(space: Space, folder: SweepFolder) -> str:
    duplicates = f" ({space.duplicates} more were the same run as another)" if space.duplicates else ""
    return f"sweep {folder.name}: {len(space.trials)} trials{duplicates}, {max(1, len(space.slots))} at a time"


def _conclude(space: Space, folder: SweepFolder, ended: Sequence[Ended]) -> None:
    """The table, and what failed as the error."""
    from pipeline.sweep import report as reporting

    outcomes = {item.trial.number: item for item in ended}
    results = [
        _result(trial, str(outcomes[trial.number].outcome.state), outcomes[trial.number].outcome.detail)
        for trial in space.trials
    ]
    say(f"\n{reporting.text(results, len(results))}")
    started = sum(not item.before for item in ended)
    failed = [item for item in results if item.state == State.FAILED]
    say(f"\nsweep {folder.name}: {len(results) - len(failed)} finished, {len(failed)} failed; {started} run just now")
    say(f"  report   doit report sweep={folder.name}\n  compare  doit ui")
    if failed:
        raise PacelineError(
            f"{len(failed)} of {len(results)} trials failed (the table above names them), the first, "
            f"trial {failed[0].number}: {failed[0].detail}",
            hint="fix it, then the same command with retry_failed=1 (finished trials are not run again)",
        )


def _result(trial: Trial, state: str, detail: str) -> TrialResult:
    from pipeline.sweep.report import TrialResult

    assert trial.run is not None
    values = figures_of(trial.run.folder) if state == State.FINISHED else {}
    return TrialResult(
        number=trial.number,
        key=trial.run.key.short,
        state=state,
        chosen=trial.chosen,
        overrides=trial.overrides,
        values=values,
        detail=_accepted(trial.run.folder) or detail,
    )


def figures_of(folder: RunFolder) -> Mapping[str, float]:
    """The numbers of result.json that a table can show; none before it is there. Raises AlteredError."""
    from pipeline.runs import acceptance

    result, _ = acceptance.standing(folder)
    if result is None:
        return {}
    speeds = {"images_per_s": result.images_per_s, "train_s": result.train_s}
    return {**result.metrics, **{name: value for name, value in speeds.items() if value is not None}}


# ---------------------------------------------------------------------------------- what would run
def _show(space: Space, *, fork: bool, retry_failed: bool) -> None:
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
        return "to run", "its data isn't fetched"
    try:
        reason = trial.run.reason
    except UsageError as error:  # a newer Paceline wrote its folder
        return "failed", error.what
    if reason is None:
        return "done", str(trial.run.accepted or "")
    known = entries.get(trial.run.key.short)
    if known is not None and known.state is State.FAILED and known.cause == "code" and not retry_failed:
        return "failed", f"{known.detail} (retry_failed=1 tries again)"
    if known is not None and known.state is not State.FINISHED:
        return "to run", f"{known.state} before: {known.detail}" if known.detail else f"{known.state} before"
    return "to run", reason


# -------------------------------------------------------------------------------------- the report
def report() -> None:
    """What a sweep's trials have come to, from its folder and the run folders."""
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep import folder as folders
    from pipeline.sweep import report as reporting

    options, runs_dir = session().asked.options, session().config.runs_dir
    folder = folders.find(runs_dir, options.get("sweep"))
    about = folder.about()
    entries = folders.latest(folder.entries()[0])
    results = []
    for item in about["trials"]:
        figures, problem = _figures_or_why(RunFolder(runs_dir / item["key"]))
        known = entries.get(item["key"])
        accepted = _accepted(RunFolder(runs_dir / item["key"])) if figures else ""
        state = "FINISHED" if figures else ALTERED if problem else str(known.state) if known is not None else "PLANNED"
        results.append(
            reporting.TrialResult(
                number=item["number"],
                key=item["key"],
                state=state,
                chosen=tuple(item["chosen"]),
                overrides=tuple(item["overrides"]),
                values=figures,
                detail=problem or accepted or (known.detail if known is not None and state != "FINISHED" else ""),
            )
        )
    by = about.get("by", reporting.BY)  # what a search looks at
    if is_on(options, "json"):
        say(json.dumps({"sweep": folder.name, **reporting.as_json(results, about["total"], by)}, indent=2))
        return
    say(f"sweep {folder.name}: {' '.join(about['words'])}")
    say(reporting.text(results, about["total"], by))


def _accepted(folder: RunFolder) -> str:
    """``accepted, not proven: as …`` of a trial for which another run holds."""
    from pipeline.runs import acceptance

    try:
        _, found = acceptance.standing(folder)
    except AlteredError:
        return ""
    return "" if found is None else str(found)


def _figures_or_why(folder: RunFolder) -> tuple[Mapping[str, float], str]:
    """Of a trial whose result was altered nothing is shown but that; the others keep theirs."""
    try:
        return figures_of(folder), ""
    except AlteredError as error:
        return {}, f"{error.what}; the sweep's command makes it again"
