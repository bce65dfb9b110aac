"""The conductor of a sweep: starts trials on free slots, follows them to their ends, and keeps the sweep's journal.

Each running trial has a thread. The threads put their results into a queue, and the loop in the main thread alone
decides what follows. A single Ctrl-C ends all trials.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cluster import launchers, starts
from pipeline.cluster.attempt.run import stop_run
from pipeline.cluster.events import FollowedEvent
from pipeline.core.errors import (
    FATAL,
    HostError,
    Killed,
    PacelineError,
    Pruned,
    UsageError,
    first_line,
    os_reason,
    without_host_and_rank,
)
from pipeline.core.files import write_hint
from pipeline.core.printable import printable
from pipeline.core.processes import threads
from pipeline.core.processes.signals import Interruptible, Stop
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import UNDER_WAY, Cluster, State, Wait
from pipeline.execution import complete as training
from pipeline.execution.run import Run
from pipeline.runs import journal
from pipeline.runs.lock import RunLock
from pipeline.sweep import folder as folders
from pipeline.sweep.folder import SweepFolder, TrialEntry
from pipeline.sweep.shared import Shared, has_incomplete_record
from pipeline.sweep.trial import (
    Outcome,
    Schedule,
    Settled,
    Start,
    Trial,
    TrialBegan,
    TrialEnded,
    TrialSource,
    cause_of,
    detail_of,
    finished_outcome,
    label,
    room_hint,
)


def end_leftovers(run: Run, say: Callable[[str], None]) -> None:
    """End processes that a killed controller left running for this key, possibly on hosts of another slot."""
    entries = journal.read(run.folder.journal)
    if not entries or entries[-1].state not in UNDER_WAY:
        return
    lock = RunLock(run.folder)
    if not lock.take():  # another command is training this run, so its controller is alive
        return
    cluster, plan = run.config.cluster, starts.newest_plan(run.folder.path)
    key = run.key.short
    try:
        if plan is not None and plan.launcher != cluster.launcher:
            say(
                f"WARNING: run {key} was under way by cluster.launcher={plan.launcher}, which these words don't reach: "
                f"doit stop {key} cluster=<the one that it was trained on> ends what it has left there"
            )
        if not launchers.capabilities(cluster).hosts_are_granted:  # otherwise the next attempt finds the job itself
            stop_run(cluster, run.folder.path, key)
    except HostError as error:
        say(f"WARNING: {error}")
    finally:
        lock.release()


_LOOK_S = 0.2  # also the delay until a search sees a new epoch

Say = Callable[[str], None]
TrialEvent = TrialBegan | TrialEnded | tuple[int, FollowedEvent | Wait]
"""The tuple: a trial's number, and an event of its run."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The parameters of a sweep."""

    source: TrialSource
    folder: SweepFolder
    key: str
    slots: Sequence[Cluster]  # none: the trials differ in their clusters, so they run one at a time
    retries: int
    retry_failed: bool
    root: Path
    argv: Sequence[str]
    say: Say
    on_event: Callable[[TrialEvent], None] = lambda _: None  # from any thread
    is_live: bool = False  # a live view gets every second of waiting by ``on_event``; else a line appears now and then
    max_trials: int | None = None  # so many trials are started; None: all


class Conductor:
    """Runs a sweep's trials."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.folder = sweep, sweep.folder
        self.stop = Stop()
        self.events: queue.SimpleQueue[tuple[Start, Outcome | None]] = queue.SimpleQueue()  # None: the slot is free
        self.threads: list[threading.Thread] = []
        self.halted = self.hint = ""
        self.shared = Shared(sweep.folder, sweep.slots, sweep.root, sweep.say)
        entries = sweep.folder.entries()
        # the last entries of earlier commands
        self._last_entry_by_key = folders.latest(entries)
        self._last_entry_by_number = {entry.number: entry for entry in entries}
        self._unrecorded: dict[str, Run] = {}  # by run key: ended before, without a complete record
        self._failures: dict[str, str] = {}  # reason → label of the first trial that failed for it
        self._decided: dict[str, Settled] = {}  # by run key: pruned or permanently failed in this command
        self.schedule = Schedule(
            sweep.source, slots=max(1, len(sweep.slots)), retries=sweep.retries, settled=self._settled,
            max_trials=sweep.max_trials,
        )  # fmt: skip
        self._unwritten: list[TrialEntry] = []  # for the sweep's journal

    # ------------------------------------------------------------------------------- the loop
    def run(self) -> list[Settled]:
        """Run the unfinished trials; return the results of all trials in the order of their ends.

        Raises Killed: Ctrl-C, SIGTERM or SIGHUP (all trials were ended on their hosts); PacelineError: the disk is
        full, or no host is left.
        """
        with Interruptible() as signals, closing(self.shared):
            try:
                while not self.schedule.done:
                    while (start := self.schedule.next()) is not None:
                        self._begin(start)
                    self._write_entries()
                    if not self.schedule.done:
                        with suppress(queue.Empty):
                            self._handle(*self.events.get(timeout=_LOOK_S))
                        self.sweep.source.watch(self.schedule.running)
                if self._unrecorded:
                    with waiting(self.sweep.say, "recording what was missed"):
                        self.shared.record_missing(list(self._unrecorded.values()))
            except BaseException:
                signals.hold()  # a second Ctrl-C must not interrupt the ending of the trials
                self.stop.request(signals.caught or "an error")
                self._join()  # the trials notice ``stop`` within a second and end on all of their hosts
                # their last states belong into the journal, too
                with suppress(queue.Empty):
                    while True:
                        start, outcome = self.events.get_nowait()
                        if outcome is not None:
                            self._note(start, outcome)
                self._write_entries()
                raise
            signals.hold()
            self._join()
        if self.halted:
            raise PacelineError(f"the sweep stopped before its end: {self.halted}", hint=self.hint)
        return self.schedule.ended

    def _begin(self, start: Start) -> None:
        self._note(start, Outcome(state=State.RUNNING))
        self._write_entries()
        trial = start.trial
        self.sweep.on_event(TrialBegan(number=trial.number, key=trial.key or "", chosen=trial.chosen))
        thread = threads.new(
            lambda: self.events.put((start, self._train(start))),
            name=f"trial-{start.trial.number}",
            # an unexpected error is the trial's failure, so that the sweep doesn't wait forever
            on_error=lambda error: self.events.put((start, Outcome(state=State.FAILED, detail=error, cause="code"))),
            daemon=False,
        )
        self.threads = [*(earlier for earlier in self.threads if earlier.is_alive()), thread]
        thread.start()

    def _handle(self, start: Start, outcome: Outcome | None) -> None:
        if outcome is None:  # trained: the next trial can use the slot while this one is evaluated and recorded
            self.schedule.free_slot(start.slot)
            return
        if start.trial.key is not None and (outcome.state is State.PRUNED or outcome.cause in FATAL):
            self._decided[start.trial.key] = Settled(trial=start.trial, outcome=outcome)
        if outcome.state is State.PRUNED:
            self.sweep.say(f"{self._label(start)} {outcome.detail}")
        slots_before = self.schedule.slots_left
        is_retried = self.schedule.end_trial(start, outcome)
        self._note(start, outcome)
        self._write_entries()
        self._report_end(start.trial, outcome, again=is_retried)
        if outcome.state is State.FAILED:
            suffix = "; it is tried again" if is_retried else ""
            # trials that fail for one reason show it once
            first = self._failures.setdefault(without_host_and_rank(outcome.detail), self._label(start))
            reason = f": {printable(outcome.detail)}" if first == self._label(start) else f" as {first}"
            self.sweep.say(f"✗ {self._label(start)} FAILED{reason}{suffix}")
        if outcome.cause == "host":
            self.shared.forget(start.slot)
            # the schedule gives up a slot with a failed host, but not the last one
            if slots_before == self.schedule.slots_left and not is_retried:
                hint = "fix it (doit preflight shows more), then the same command"
                self._halt(f"no host is left: {outcome.detail}", hint)
        if outcome.cause == "disk":
            self._halt(outcome.detail, outcome.hint)

    def _halt(self, reason: str, hint: str) -> None:
        """Start no more trials; running ones continue."""
        if not self.halted:
            self.halted, self.hint = reason, hint
        self.schedule.halt()

    def _join(self) -> None:
        for thread in self.threads:
            if thread.ident is not None:  # a signal may come between creation and start
                thread.join()

    # ----------------------------------------------------------------------------- the journal
    def _note(self, start: Start, outcome: Outcome) -> None:
        trial = start.trial
        entry = TrialEntry(
            number=trial.number, key=trial.key or "", state=outcome.state, time=time.time(), cause=outcome.cause,
            detail=trial.config.hide(outcome.detail), slot=start.slot,
        )  # fmt: skip
        self._unwritten.append(entry)

    def _write_entries(self) -> None:
        """Write pending entries. A full disk halts the sweep, but not the running trials."""
        try:
            self.folder.note(self._unwritten)
            self._unwritten = []
        except OSError as error:
            self._halt(os_reason(error), write_hint(error, self.folder.path.parent.parent))

    def _settled(self, trial: Trial) -> Settled | None:
        """Return the result of a trial that needs no start, or None. A missing record is made at the sweep's end."""
        try:
            ended = self._known_result(trial)
        except UsageError as error:  # a newer Paceline wrote its folder; the other trials continue
            return self._settle_unstarted(trial, Outcome(state=State.FAILED, detail=error.what), error.what)
        if ended is not None:
            self._report_end(trial, ended.outcome, again=False)
            # Only runs of this sweep's earlier commands: for a run that was finished outside of the sweep,
            # `_known_result` has just started a recorder, which may not have completed the record yet.
            if trial.run is not None and trial.key in self._last_entry_by_key and has_incomplete_record(trial.run):
                self._unrecorded[trial.run.key.short] = trial.run
        return ended

    def _report_end(self, trial: Trial, outcome: Outcome, *, again: bool) -> None:
        self.sweep.on_event(TrialEnded(**vars(outcome), number=trial.number, chosen=trial.chosen, again=again))

    def _known_result(self, trial: Trial) -> Settled | None:
        """Return the result of a finished, pruned or permanently failed trial; None: start it."""
        assert trial.run is not None
        key = trial.run.key.short
        earlier = self._last_entry_by_key.get(key)
        if trial.run.reason is None:  # there is nothing to train
            if earlier is None:  # another command finished it: note that it is part of this sweep, also in MLflow
                with suppress(OSError):
                    if folders.add_to_run(trial.run.folder, self.folder, self.sweep.key, trial.number, trial.chosen):
                        self.shared.recorder(trial.run).start()
            return self._settle_unstarted(trial, finished_outcome(trial.run), "was finished before")
        # a search may choose a configuration again, which is the same run
        if (decided := self._decided.get(key)) is not None:
            return self._settle_unstarted(trial, decided.outcome, f"the same run as trial {decided.trial.number}")
        if earlier is None:
            return None
        # a controller that was killed may have noted the pruning only in the run's own journal
        entries = journal.read(trial.run.folder.journal)
        was_pruned = bool(entries) and entries[-1].state is State.PRUNED
        if earlier.state is State.PRUNED or was_pruned:
            return self._settle_unstarted(trial, Outcome(state=State.PRUNED), "was pruned before")
        if earlier.state is State.FAILED and earlier.cause in FATAL and not self.sweep.retry_failed:
            failed = Outcome(state=State.FAILED, detail=earlier.detail, cause=earlier.cause)
            return self._settle_unstarted(trial, failed, earlier.detail)
        return None

    def _settle_unstarted(self, trial: Trial, outcome: Outcome, detail: str) -> Settled:
        """Return a result that needs no start; note it with ``detail`` in the journal, unless it is there already."""
        entry = self._last_entry_by_number.get(trial.number)
        if entry is None or (entry.key, entry.state) != (trial.key, outcome.state):
            self._note(Start(trial=trial, slot=-1, tried=0), replace(outcome, detail=detail))
        return Settled(trial=trial, outcome=outcome, was_known=True)

    # ------------------------------------------------------------------- in the trial's thread
    def _train(self, start: Start) -> Outcome:
        assert start.trial.run is not None
        run = self.shared.placed(start.trial.run, start.slot)
        prefix, trained = self._label(start), threading.Event()

        def say(text: str) -> None:
            self.sweep.say("\n".join(f"{prefix} | {line}" for line in text.splitlines()))

        # torchrun has ended, so the slot's hosts are free, while this thread goes on to report and record
        def on_trained() -> None:
            trained.set()
            self.events.put((start, None))

        def on_event(event: FollowedEvent | Wait) -> None:
            self.sweep.on_event((start.trial.number, event))

        services = self.shared.services(run, start.slot, on_trained, self.stop)
        services = replace(services, on_event=on_event, on_wait=on_event if self.sweep.is_live else None)
        try:
            end_leftovers(run, say)
            folders.add_to_run(run.folder, self.folder, self.sweep.key, start.trial.number, start.trial.chosen)
            training.train(run, argv=self.sweep.argv, say=say, services=services)
        except Pruned as error:
            return Outcome(state=State.PRUNED, detail=first_line(error))
        except Killed as error:
            return Outcome(state=State.KILLED, detail=first_line(error))
        except (PacelineError, OSError) as error:
            cause = cause_of(error)
            hint = room_hint(error, run) if cause == "disk" else ""
            return Outcome(state=State.FAILED, detail=detail_of(error), cause=cause, hint=hint)
        return finished_outcome(run, elsewhere=not trained.is_set())

    def _label(self, start: Start) -> str:
        return label(start.trial.number, self.sweep.source.total)
