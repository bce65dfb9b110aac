"""A trial of a sweep, with its outcome, events and log line; the interface of a source of trials; and their schedule.

A slot is a part of the cluster on which one trial runs at a time.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.cluster import launchers
from pipeline.cluster.attempt.failures import FULL_DISK
from pipeline.config.build import RunConfig
from pipeline.core.errors import HostError, PacelineError, TrainingError, os_reason
from pipeline.core.files import FULL, room_needed
from pipeline.core.specs import State
from pipeline.core.tables import duration
from pipeline.execution.run import Run
from pipeline.runs import acceptance
from pipeline.runs.contents import distinguishing_labels

_FULL = (*FULL, errno.EROFS)
_LONGEST = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of a sweep: an ordinary run, and what distinguishes it from the other trials."""

    number: int  # from 0, in the sweep's order
    chosen: tuple[str, ...]  # the overrides that the sweep chose
    overrides: tuple[str, ...]  # all of them: `doit train` with these is the same run
    config: RunConfig
    run: Run | None  # None while the data is missing, on which the key depends

    @property
    def key(self) -> str | None:
        """The run key, once the data exists."""
        return self.run.key.short if self.run is not None else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a trial: FINISHED, PRUNED, FAILED or KILLED."""

    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)  # of result.json, if it is FINISHED
    detail: str = ""  # the error's first line
    elsewhere: bool = False  # another command trained it while this one waited
    cause: str = ""  # of a failure, see ``cause_of``
    hint: str = ""  # how to make room, if the cause is a full disk


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    """A trial starts."""

    number: int
    key: str
    chosen: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Outcome):
    """A trial has ended, possibly before this command began. ``again``: it will be retried."""

    number: int
    chosen: tuple[str, ...]
    again: bool = False


class TrialSource(Protocol):
    """The source of trials: a grid known in advance, or a search that is queried as slots become free.

    All calls come from the scheduler's thread. A retried trial isn't requested again. ``tell`` is called once per
    trial, with the last outcome, also if the trial was finished before.
    """

    @property
    def total(self) -> int:
        """The number of trials, fixed when the sweep begins."""
        ...

    def next_trial(self) -> Trial | None:
        """Return the next trial; None when the total is reached."""
        ...

    def watch(self, running: Sequence[Trial]) -> None:
        """Called about once a second with the running trials."""
        ...

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Record the end of a trial."""
        ...


def finished_outcome(run: Run, *, elsewhere: bool = False) -> Outcome:
    """Return the outcome of a finished run, from its result.json."""
    result, _ = acceptance.result_or_accepted(run.folder)
    metrics = result.metrics if result is not None else {}
    return Outcome(state=State.FINISHED, metrics=metrics, elsewhere=elsewhere)


def detail_of(error: PacelineError | OSError) -> str:
    """Return the first line of an error, shortened for a table. The run's journal has the whole text."""
    text = error.what if isinstance(error, PacelineError) else os_reason(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # the second line of a HostError names the first host
    summary = ": ".join(lines[: 2 if isinstance(error, HostError) else 1])
    return summary if len(summary) <= _LONGEST else f"{summary[:_LONGEST]}…"


def cause_of(error: PacelineError | OSError) -> str:
    """Return the cause of a failure: host, disk (other trials would fail too), code, or that of a TrainingError."""
    if isinstance(error, HostError):
        return "host"
    if isinstance(error, TrainingError):
        return error.cause
    reason = error if isinstance(error, OSError) else error.__cause__
    is_disk = FULL_DISK.search(str(error)) or (isinstance(reason, OSError) and reason.errno in _FULL)
    return "disk" if is_disk else "code"


def room_hint(error: PacelineError | OSError, run: Run) -> str:
    """Return how to make room for a sweep that a full disk has halted."""
    if isinstance(error, TrainingError) and not launchers.capabilities(run.config.cluster).is_this_computer:
        return "make room there, then the same command"
    if isinstance(error, PacelineError) and error.hint is not None:
        return error.hint
    return room_needed(run.folder.path.parent)


def label(number: int, total: int) -> str:
    """Return the name of a trial in log lines, padded to the widest number: ``trial  3`` of 12."""
    return f"trial {number:>{len(str(max(0, total - 1)))}}"


def words_of_trial(chosen: Sequence[str]) -> str:
    """Shorten ``optimizer.lr=0.1 seed=2`` to ``lr=0.1 seed=2``, as MLflow names the run; keep all if none is left."""
    return " ".join(distinguishing_labels(chosen, {}) or chosen)


class TrialLines:
    """Formats a line for each of ``total`` trials that this command has finished; the conductor reports failures."""

    def __init__(self, total: int, metric: str) -> None:
        self._total, self._metric = total, metric
        self._began: dict[int, tuple[float, str]] = {}  # number of a trial → time of its start, run key
        self._ended: set[int] = set()  # numbers of trials

    def line(self, event: object, now: float) -> str | None:
        """Return ``✓  5/18  lr=0.1 seed=2  val/accuracy 0.4440  12.5 s  (b20f8db36d40)``, or None.

        ``event``: of the sweep. ``now``: seconds of a monotonic clock.
        """
        if isinstance(event, TrialBegan):
            self._began[event.number] = now, event.key
        if not isinstance(event, TrialEnded) or event.again:
            return None
        self._ended.add(event.number)
        if event.state is not State.FINISHED or event.number not in self._began:
            return None
        began, key = self._began.pop(event.number)
        value = event.metrics.get(self._metric)
        figure = () if value is None else (f"{self._metric} {value:.4f}",)
        count = f"✓ {len(self._ended):>{len(str(self._total))}}/{self._total}"
        return "  ".join((count, words_of_trial(event.chosen), *figure, duration(now - began), f"({key})"))


# ---------------------------------------------------------------------------------------- the schedule
_TRANSIENT = ("host", "memory")  # causes of failures after which a retry may succeed


@dataclass(frozen=True, kw_only=True)
class Start:
    """A trial to start now. ``tried`` counts its earlier attempts in this command."""

    trial: Trial
    slot: int
    tried: int


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The result of a trial. ``was_known``: there was one already, so nothing was started."""

    trial: Trial
    outcome: Outcome
    was_known: bool = False


class Schedule:
    """Assigns trials to slots: a slot takes the next trial as soon as it is free, without waiting for a batch.

    ``settled``: returns the result of a trial that needs no start (finished before, failed permanently), or None.
    ``max_trials``: so many trials are started, however often each is retried; None: all.
    """

    def __init__(
        self,
        source: TrialSource,
        *,
        slots: int,
        retries: int,
        settled: Callable[[Trial], Settled | None],
        max_trials: int | None = None,
    ) -> None:
        self._source, self._retries, self._settled = source, retries, settled
        self._remaining_starts = max_trials
        self._free = deque(range(slots))
        self._slots = slots
        self._waiting: deque[tuple[Trial, int]] = deque()  # trials taken from the source, and their attempts so far
        self._running: dict[int, Start] = {}  # by the number of the trial
        self._exhausted = self._halted = False
        self.ended: list[Settled] = []

    def next(self) -> Start | None:
        """Return the next trial to start; None if there is none, no slot is free, or its run is in progress."""
        while self._free and not self._halted:
            if self._waiting:
                trial, tried = self._waiting.popleft()
            else:
                is_over = self._exhausted or self._remaining_starts == 0
                next_trial = None if is_over else self._source.next_trial()
                if next_trial is None:
                    self._exhausted = True
                    return None
                trial, tried = next_trial, 0
            if trial.key is not None and any(trial.key == other.key for other in self.running):
                # The same run is in progress, and its result will hold for this trial too, so this trial waits. Later
                # trials also wait, because trials start in the order of the sweep.
                self._waiting.appendleft((trial, tried))
                return None
            if (settled := self._settled(trial)) is not None:
                self._record(settled)
                continue
            if self._remaining_starts is not None and tried == 0:
                self._remaining_starts -= 1
            start = Start(trial=trial, slot=self._free.popleft(), tried=tried)
            self._running[trial.number] = start
            return start
        return None

    @property
    def running(self) -> list[Trial]:
        """The trials in progress."""
        return [start.trial for start in self._running.values()]

    def free_slot(self, slot: int) -> None:
        """Mark a slot's hosts as free; its trial may still be completing."""
        if slot not in self._free:
            self._free.append(slot)

    def end_trial(self, start: Start, outcome: Outcome) -> bool:
        """Record the end of a trial; return True if it will be retried."""
        del self._running[start.trial.number]
        # a slot on which a host failed is given up, unless it is the last
        if outcome.cause == "host" and self._slots > 1:
            self._slots -= 1
            if start.slot in self._free:
                self._free.remove(start.slot)
        # the slot may already train the next trial, while this one was evaluated
        elif not any(other.slot == start.slot for other in self._running.values()):
            self.free_slot(start.slot)
        if outcome.state is State.FAILED and outcome.cause in _TRANSIENT and start.tried < self._retries:
            self._waiting.append((start.trial, start.tried + 1))
            return True
        self._record(Settled(trial=start.trial, outcome=outcome))
        return False

    @property
    def slots_left(self) -> int:
        """The number of slots that were not given up."""
        return self._slots

    def halt(self) -> None:
        """Start no more trials."""
        self._halted = True

    @property
    def done(self) -> bool:
        """True if nothing runs and nothing will be started."""
        return not self._running and (self._halted or (self._exhausted and not self._waiting))

    def _record(self, ended: Settled) -> None:
        self.ended.append(ended)
        self._source.tell(ended.trial, ended.outcome)
