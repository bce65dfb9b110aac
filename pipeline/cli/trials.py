"""What the trials of a grid and of a search share: one command at work, their conduct, and what they have come to."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli import commands, showing, telling
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT
from pipeline.core.errors import Killed, PacelineError, os_reason
from pipeline.core.files import remove_leftovers, write_hint
from pipeline.core.locks import FileLock
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.specs import State
from pipeline.runs import layout
from pipeline.runs.result import AlteredError, nonfinite_note

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pipeline.live.sweep_state import SweepState
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep import Space
    from pipeline.sweep.folder import SweepFolder
    from pipeline.sweep.report import TrialResult
    from pipeline.sweep.schedule import Ended
    from pipeline.sweep.search_source import SearchPlan
    from pipeline.sweep.trial import TrialSource

_ENDS = (State.FINISHED, State.PRUNED, State.FAILED)


@contextmanager
def alone(folder: SweepFolder) -> Iterator[None]:
    """The only command to run this sweep; a second one waits. A Killed that comes out says how to go on."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_keep(folder, error) from error
    lock = FileLock(folder.lock)
    if not lock.take():
        note(f"another command is running sweep {folder.name}; waiting for it")
        with Heartbeat(note) as heartbeat:
            heartbeat.doing(f"waiting for the command that runs sweep {folder.name}")
            lock.wait()
    try:
        remove_leftovers([folder.path])
        for line in layout.set_aside(folder.path):
            note(line)
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
    return PacelineError(what, hint=write_hint(error, folder.path.parent.parent))


def conducted(
    what: Space | SearchPlan, source: TrialSource, folder: SweepFolder, headline: str, *, retry_failed: bool
) -> list[Ended]:
    """Run the trials of a grid or a search to their end, talking to the terminal. Raises Killed."""
    from pipeline.sweep.conduct import Sweep, conduct
    from pipeline.sweep.search_source import SearchPlan
    from pipeline.sweep.trial import TrialLines

    if any(slot.spares for slot in what.slots):
        note("cluster.spares: a sweep takes none; a trial that loses its hosts is tried again on those that are left")
    first = (what.representative_trial if isinstance(what, SearchPlan) else what.trials[0]).config
    commands.refuse_unfit(first.cluster)
    begun = showing.of_sweep(lambda: _begun(what, source, folder), folder.path.parent.parent)
    with begun as shown, telling.of_sweep(first, folder.name, source.total, shown.say) as told:
        shown.say(headline)
        ended = conduct(
            Sweep(
                source=source,
                folder=folder,
                key=what.key,
                slots=what.slots,
                retries=what.settings.retries,
                retry_failed=retry_failed,
                root=ROOT,
                argv=sys.argv,
                say=shown.say,
                on_event=showing.sweep_teller(shown, told.hear, TrialLines(source.total, _metric(what)[0]).of),
                watched=shown.is_live,
            )
        )
        told.ended(*_summed(ended))
    return ended


def _summed(ended: Sequence[Ended]) -> tuple[Mapping[str, float], str]:
    """For a notice: how many trials ended how, and the first that failed."""
    failed = [item for item in ended if item.outcome.state is State.FAILED]
    counts = {f"trials_{state.lower()}": float(sum(item.outcome.state is state for item in ended)) for state in _ENDS}
    first = f"{len(failed)} of {len(ended)} trials failed: {failed[0].outcome.detail}" if failed else ""
    return counts, first


def _begun(what: Space | SearchPlan, source: TrialSource, folder: SweepFolder) -> SweepState:
    """For its view. The best is that of a search's first objective."""
    from pipeline.live.sweep_state import SweepState

    metric, maximize = _metric(what)
    at_once = max(1, len(what.slots))
    return SweepState(name=folder.name, total=source.total, at_once=at_once, metric=metric, maximize=maximize)


def _metric(what: Space | SearchPlan) -> tuple[str, bool]:
    """By which the best trial is found, and whether it is to be high."""
    from pipeline.sweep import report as reporting
    from pipeline.sweep.search_source import SearchPlan, objectives

    if not isinstance(what, SearchPlan):
        return reporting.BY, True
    goal = objectives(what.config)[0]
    return goal.metric, goal.direction == "maximize"


# ----------------------------------------------------------------------------- what they have come to
def result_of(item: Ended) -> TrialResult:
    """A trial that has ended, as a report shows it. Raises AlteredError."""
    from pipeline.sweep.report import TrialResult

    trial, state = item.trial, item.outcome.state
    folder = trial.run.folder if trial.run is not None and state is State.FINISHED else None
    return TrialResult(
        number=trial.number,
        key=trial.key or "",
        state=str(state),
        chosen=trial.chosen,
        overrides=trial.overrides,
        values=figures_of(folder) if folder else {},
        detail=(said_of(folder) if folder else "") or item.outcome.detail,
    )


def conclude(folder: SweepFolder, results: Sequence[TrialResult], ended: Sequence[Ended]) -> None:
    """The last lines of a sweep whose table was shown. Raises PacelineError: trials have failed."""
    counts = {state: sum(item.state == state for item in results) for state in State}
    shown = [f"{counts[state]} {state.lower()}" for state in _ENDS if counts[state] or state is not State.PRUNED]
    elsewhere = sum(item.outcome.elsewhere for item in ended)
    started = sum(not item.before for item in ended) - elsewhere
    others = f", {elsewhere} by another command meanwhile" if elsewhere else ""
    say(f"\nsweep {folder.name}: {', '.join(shown)}; {started} run just now{others}")
    say(f"  report   doit report sweep={folder.name}\n  compare  doit ui")
    failed = [item for item in results if item.state == State.FAILED]
    if failed:
        raise PacelineError(
            f"{len(failed)} of {len(results)} trials failed (the table above names them), the first, "
            f"trial {failed[0].number}: {failed[0].detail}",
            hint="fix it, then the same command with retry_failed=1 (finished trials are not run again)",
        )


def figures_of(folder: RunFolder) -> Mapping[str, float]:
    """The numbers of result.json that a table can show; none before it is there. Raises AlteredError."""
    from pipeline.runs import acceptance

    result, _ = acceptance.standing(folder)
    if result is None:
        return {}
    speeds = {"images_per_s": result.images_per_s, "train_s": result.train_s}
    return {**result.metrics, **{name: value for name, value in speeds.items() if value is not None}}


def said_of(folder: RunFolder) -> str:
    """``accepted, not proven: as …`` of a trial for which another run holds; else a metric that was no number."""
    from pipeline.runs import acceptance

    try:
        result, found = acceptance.standing(folder)
    except AlteredError:
        return ""
    if found is not None:
        return str(found)
    return "" if result is None else nonfinite_note(result.fields)
