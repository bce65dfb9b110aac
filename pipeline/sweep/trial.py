"""A trial of a sweep: its source, outcome, events and line in a log; and when which trial starts on which slot."""

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
    """One point of a sweep: an ordinary run, and what distinguishes it.

    ``number`` counts from 0 in the sweep's order. ``chosen`` are the overrides that the sweep chose, ``overrides`` all
    of them: `doit train` with these is the same run. ``run`` is None while the data is missing and the key therefore
    unknown.
    """

    number: int
    chosen: tuple[str, ...]
    overrides: tuple[str, ...]
    config: RunConfig
    run: Run | None

    @property
    def key(self) -> str | None:
        """The run key, once the data exists."""
        return self.run.key.short if self.run is not None else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a trial: FINISHED with the flat ``metrics`` of result.json, PRUNED, or FAILED with its first line.

    ``elsewhere``: another command ran it while this one waited. ``cause`` is that of a failure, ``hint`` how to make
    room if that is a full disk.
    """

    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    elsewhere: bool = False
    cause: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    """A trial starts."""

    number: int
    key: str
    chosen: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Outcome):
    """A trial ended, possibly before this command. ``again``: it will be retried."""

    number: int
    chosen: tuple[str, ...]
    again: bool = False


class TrialSource(Protocol):
    """The source of trials: a grid known in advance, or a search that is queried as slots become free.

    All calls come from the scheduler's thread. A retried trial isn't requested again; ``tell`` is called once per trial
    with its last outcome (also if it was finished before).
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


def finished(run: Run, *, elsewhere: bool = False) -> Outcome:
    """Return the outcome of a finished run, from its result.json."""
    result, _ = acceptance.result_or_accepted(run.folder)
    metrics = result.metrics if result is not None else {}
    return Outcome(state=State.FINISHED, metrics=metrics, elsewhere=elsewhere)


def detail_of(error: PacelineError | OSError) -> str:
    """Return the first line of an error, shortened for a table; for a HostError also the second, with the first host.

    The run's journal has the whole text.
    """
    text = error.what if isinstance(error, PacelineError) else os_reason(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    summary = ": ".join(lines[: 2 if isinstance(error, HostError) else 1])
    return summary if len(summary) <= _LONGEST else f"{summary[:_LONGEST]}…"


def cause_of(error: PacelineError | OSError) -> str:
    """Return ``host``, ``memory``, ``disk`` (other trials would fail too), ``code``, or a TrainingError's cause."""
    if isinstance(error, HostError):
        return "host"
    if isinstance(error, TrainingError):
        return error.cause
    reason = error if isinstance(error, OSError) else error.__cause__
    full = FULL_DISK.search(str(error)) or (isinstance(reason, OSError) and reason.errno in _FULL)
    return "disk" if full else "code"


def room_hint(error: PacelineError | OSError, run: Run) -> str:
    """Return how to make room for a sweep that a full disk has halted."""
    if isinstance(error, TrainingError) and not launchers.capabilities(run.config.cluster).is_this_computer:
        return "make room there, then the same command"
    if isinstance(error, PacelineError) and error.hint is not None:
        return error.hint
    return room_needed(run.folder.path.parent)


def label(number: int, total: int) -> str:
    """Return the name of a trial in log lines: ``trial  3`` of 12, padded to the widest number."""
    return f"trial {number:>{len(str(max(0, total - 1)))}}"


def words_of_trial(chosen: Sequence[str]) -> str:
    """Shorten ``optimizer.lr=0.1 seed=2`` to ``lr=0.1 seed=2``, as MLflow names it; if nothing is left, keep all."""
    return " ".join(distinguishing_labels(chosen, {}) or chosen)


class TrialLines:
    """Formats a line for each trial that a command has brought to a good end.

    A failure is reported elsewhere, together with the decision about a retry. ``total``: the number of trials.
    ``metric``: the sweep's metric, such as val/accuracy.
    """

    def __init__(self, total: int, metric: str) -> None:
        self._total, self._metric = total, metric
        self._began: dict[int, tuple[float, str]] = {}
        self._done: set[int] = set()

    def of(self, event: object, now: float) -> str | None:
        """Return ``✓  5/18  lr=0.1 seed=2  val/accuracy 0.4440  12.5 s  (b20f8db36d40)``, or None.

        ``event``: of the sweep. ``now``: seconds of a monotonic clock.
        """
        if isinstance(event, TrialBegan):
            self._began[event.number] = now, event.key
        if not isinstance(event, TrialEnded) or event.again:
            return None
        self._done.add(event.number)
        if event.state is not State.FINISHED or event.number not in self._began:
            return None
        began, key = self._began.pop(event.number)
        value = event.metrics.get(self._metric)
        figure = () if value is None else (f"{self._metric} {value:.4f}",)
        count = f"✓ {len(self._done):>{len(str(self._total))}}/{self._total}"
        return "  ".join((count, words_of_trial(event.chosen), *figure, duration(now - began), f"({key})"))


# ---------------------------------------------------------------------------------------- the schedule
_TRANSIENT = ("host", "memory")  # causes of failures that a retry may not meet again


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
    ``most``: so many trials are started, however often each is retried; None: all.
    """

    def __init__(
        self,
        source: TrialSource,
        *,
        slots: int,
        retries: int,
        settled: Callable[[Trial], Settled | None],
        most: int | None = None,
    ) -> None:
        self._source, self._retries, self._settled = source, retries, settled
        self._remaining = most
        self._free = deque(range(slots))
        self._slots = slots
        self._waiting: deque[tuple[Trial, int]] = deque()  # trials taken from the source, and their attempts so far
        self._running: dict[int, Start] = {}
        self._exhausted = self._halted = False
        self.ended: list[Settled] = []

    def next(self) -> Start | None:
        """Return the next trial to start; None if there is none, no slot is free, or its run is in progress."""
        while self._free and not self._halted:
            if self._waiting:
                trial, tried = self._waiting.popleft()
            else:
                taken = None if self._exhausted or self._remaining == 0 else self._source.next_trial()
                if taken is None:
                    self._exhausted = True
                    return None
                trial, tried = taken, 0
            if trial.key is not None and any(trial.key == other.key for other in self.running):
                # The same run is in progress, and its result will hold for this trial too, so this trial waits. Later
                # trials also wait, because trials start in the order of the sweep.
                self._waiting.appendleft((trial, tried))
                return None
            if (known := self._settled(trial)) is not None:
                self._record(known)
                continue
            if self._remaining is not None and tried == 0:
                self._remaining -= 1
            start = Start(trial=trial, slot=self._free.popleft(), tried=tried)
            self._running[trial.number] = start
            return start
        return None

    @property
    def running(self) -> list[Trial]:
        """The trials in progress."""
        return [start.trial for start in self._running.values()]

    def freed(self, slot: int) -> None:
        """Mark a slot's hosts as free; its trial may still be completing."""
        if slot not in self._free:
            self._free.append(slot)

    def finished(self, start: Start, outcome: Outcome) -> bool:
        """Record the end of a trial; return True if it will be retried.

        A slot on which a host failed is given up, unless it is the last.
        """
        del self._running[start.trial.number]
        if outcome.cause == "host" and self._slots > 1:
            self._slots -= 1
            if start.slot in self._free:
                self._free.remove(start.slot)
        elif not any(other.slot == start.slot for other in self._running.values()):
            self.freed(start.slot)
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
