"""Follow a run or a sweep that another command works on, for ``doit status`` and ``doit logs``.

That command writes files. They are read here twice a second and turned into the same events that the command itself
passes to its own live view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.cluster import starts
from pipeline.cluster.attempt.failures import is_worth_showing
from pipeline.cluster.events import LogLine
from pipeline.cluster.launchers.transport.answers import log_line
from pipeline.core import locks
from pipeline.core.errors import UsageError
from pipeline.core.specs import LaunchPlan, State, Wait
from pipeline.live.screen import Screen
from pipeline.live.state import STEPS, GrowingFile
from pipeline.live.sweep_state import SweepState, after_trial_event
from pipeline.runs import acceptance, journal, ranks
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from pipeline.sweep.folder import SweepFolder, TrialEntry
from pipeline.sweep.results import MINIMIZE, direction_of
from pipeline.sweep.trial import TrialBegan, TrialEnded, label
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, RankBeat

_POLL_S = 0.5
_LAST_BYTES = 1 << 16  # that are read of a log which is already longer


# ------------------------------------------------------------------------------------- of another command
def is_under_way(folder: RunFolder | SweepFolder) -> bool:
    """Return True if a command works on it now. A killed command holds no lock, whatever the journal says."""
    return locks.is_held(folder.lock)


def may_go_on_until(folder: RunFolder) -> float:
    """Return until when (unix seconds) ranks may still run although the run's command was killed; 0: none run.

    The hosts end them ``lease_s`` after they last heard of the command; at the latest, after its last write to a file.
    """
    entries, plan = journal.read(folder.journal), starts.unfinished_plan(folder.path)
    if plan is None or not entries or entries[-1].state is not State.RUNNING:
        return 0.0
    attempt, plan_file = folder.path / run_folder.ATTEMPTS / str(plan.attempt), folder.path / run_folder.PLAN
    begun = _modified_at(plan_file)
    if all(_modified_at(attempt / f"{node.host}.exit.json") > begun for node in plan.nodes):
        return 0.0
    logs = [attempt / f"{node.host}.log" for node in plan.nodes]
    return max(map(_modified_at, [plan_file, folder.journal, attempt / ranks.FILE, *logs])) + plan.lease_s


def _modified_at(path: Path) -> float:
    """Return when a file was modified, in unix seconds; 0: it isn't there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def follow(
    folder: RunFolder | SweepFolder,
    files: AttemptFiles | SweepFiles,
    screen: Screen,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Pass what is added to the files of a run or a sweep to the screen until no command works on it any more.

    For a sweep, ``files`` must be the object from which the screen's first state was read (``so_far``).
    """
    since = time.monotonic()
    while True:
        over = not is_under_way(folder)  # before the files are read: the last lines come before the end
        for event in files.new_events():
            screen.show_event(event)
            for text in files.shown_lines(event):
                screen.say(text)
        if over:
            return
        if screen.is_live and isinstance(folder, RunFolder):
            screen.show_event(Wait(what=ranks.under_way(folder), for_s=time.monotonic() - since))
        sleep(_POLL_S)


# ---------------------------------------------------------------------------------------------- a run
class AttemptFiles:
    """The files of a run's newest attempt: its plan, its logs and the reports of its ranks."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._plan: LaunchPlan | None = None
        self._logs: dict[Path, GrowingFile] = {}
        self._beats_mtime_ns = 0

    def new_events(self) -> Iterator[Any]:
        """Yield LaunchPlan, LogLine and NodeBeat events for what was added since the last call."""
        plan = starts.newest_plan(self._folder.path)
        if plan is None:
            return
        if self._plan is None or plan.run_id != self._plan.run_id:  # a new attempt
            self._plan, self._logs, self._beats_mtime_ns = plan, {}, 0
            yield plan
        attempt = self._folder.path / run_folder.ATTEMPTS / str(plan.attempt)
        for node in plan.nodes:
            path = attempt / f"{node.host}.log"
            if path not in self._logs:
                yield from _totals(node.host, path)
            log = self._logs.setdefault(path, GrowingFile(path, _LAST_BYTES))
            yield from (log_line(node.host, text.decode(errors="replace")) for text in log.new_lines())
        with suppress(OSError):
            mtime_ns = (attempt / ranks.FILE).stat().st_mtime_ns
            if mtime_ns != self._beats_mtime_ns:
                self._beats_mtime_ns = mtime_ns
                yield from beats(attempt)

    def shown_lines(self, event: Any) -> Iterator[str]:
        """Return the line that the run's own command prints for an event, if any."""
        if isinstance(event, LogLine) and is_worth_showing(event):
            yield event.shown


def _totals(host: str, path: Path) -> Iterator[LogLine]:
    """Yield the line with the total numbers of steps of a long log, of which GrowingFile reads only the end."""
    with suppress(OSError), path.open("rb") as file:
        if file.seek(0, 2) <= _LAST_BYTES:
            return
        file.seek(0)
        lines = (log_line(host, text.decode(errors="replace")) for text in file.read(_LAST_BYTES).splitlines())
        yield from (line for line in lines if STEPS.search(line.text))


def beats(attempt: Path) -> Iterator[NodeBeat]:
    """Return the last report of each host, from the file that the command rewrites every other second."""
    rows, _ = ranks.read(attempt)
    usages = ranks.usages(attempt)
    for host in dict.fromkeys([*(row.host for row in rows), *usages]):
        rank_beats = tuple(
            RankBeat(
                rank=row.rank, pid=0, step=row.step, phase=row.phase, moves=0, for_s=row.for_s, collectives=0,
                own_s=row.own_s,
            )
            for row in rows
            if row.host == host
        )  # fmt: skip
        yield NodeBeat(host=host, ranks=rank_beats, usage=usages.get(host))


# -------------------------------------------------------------------------------------------- a sweep
class SweepFiles:
    """The files of a sweep that another command runs: its journal, and the folders of running trials."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder, self._runs_dir = folder, folder.path.parent.parent
        self._chosen: Mapping[int, tuple[str, ...]] = {}  # trial number → overrides in which it differs from others
        self._entries_read = 0
        self._running: dict[int, AttemptFiles] = {}
        self._total = 0

    def so_far(self, unix_now: float, now: float) -> SweepState:
        """Read the journal from its beginning, and return the state of the sweep.

        ``unix_now`` and ``now`` are the same moment, in unix seconds and in seconds of the monotonic clock.
        """
        record = self._folder.read_begun()
        self._total, maximize = record.total, direction_of(record.by, record.goals) != MINIMIZE
        state = SweepState(
            name=self._folder.name, total=record.total, at_once=record.at_once, metric=record.by, maximize=maximize
        )
        for entry in self._entries():
            state = after_trial_event(state, self._event(entry), now - (unix_now - entry.time))
        return state

    def new_events(self) -> Iterator[Any]:
        """Yield TrialBegan, TrialEnded, and (trial number, event) for what was added since the last call."""
        yield from map(self._event, self._entries())
        for number, files in self._running.items():
            yield from ((number, event) for event in files.new_events())

    def shown_lines(self, event: Any) -> Iterator[str]:
        """Return the line that the sweep's own command prints for an event, if any."""
        if isinstance(event, TrialEnded) and event.state is not State.FINISHED:
            failed = event.state is State.FAILED
            how = f"FAILED: {event.detail}" if failed else event.detail or event.state
            yield f"{'✗ ' if failed else ''}{label(event.number, self._total)} {how}"
        if type(event) is tuple and isinstance(event[1], LogLine) and is_worth_showing(event[1]):
            yield f"{label(event[0], self._total)} | {event[1].shown}"

    def _entries(self) -> list[TrialEntry]:
        """Return the new journal entries; none if the journal can't be read now."""
        with suppress(OSError):
            entries = self._folder.entries()
            new, self._entries_read = entries[self._entries_read :], len(entries)
            return new
        return []

    def _event(self, entry: TrialEntry) -> TrialBegan | TrialEnded:
        chosen = self._chosen_by(entry.number)
        if entry.state is State.RUNNING:
            self._running[entry.number] = AttemptFiles(RunFolder(self._runs_dir / entry.key))
            return TrialBegan(number=entry.number, key=entry.key, chosen=chosen)
        self._running.pop(entry.number, None)
        figures = self._figures(entry.key) if entry.state is State.FINISHED else {}
        again = entry.state is State.KILLED  # it ended with its command, and the next command continues it
        return TrialEnded(
            number=entry.number, chosen=chosen, state=entry.state, metrics=figures, detail=entry.detail, again=again
        )

    def _chosen_by(self, number: int) -> tuple[str, ...]:
        """Return the overrides in which a trial differs from the others; () if they can't be read."""
        if number not in self._chosen:  # a search adds trials to the file, each before it starts
            with suppress(UsageError, OSError):
                self._chosen = {trial.number: trial.chosen for trial in self._folder.read_begun().trials}
        return self._chosen.get(number, ())

    def _figures(self, key: str) -> Mapping[str, float]:
        with suppress(AlteredError, UsageError, OSError):
            result, _ = acceptance.result_or_accepted(RunFolder(self._runs_dir / key))
            return {} if result is None else result.metrics
        return {}
