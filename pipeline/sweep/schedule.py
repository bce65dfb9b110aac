"""The schedule of a sweep: which trial starts on which slot, and which one is retried."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.specs import State
from pipeline.sweep.trial import Outcome, Trial, TrialSource

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

    Args:
        settled: returns the result of a trial that needs no start (finished before, failed permanently), or None.
        most: so many trials are started, however often each is retried; None: all.
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
            trial, tried = self._take()
            if trial is None:
                return None
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

    def _take(self) -> tuple[Trial | None, int]:
        if self._waiting:
            return self._waiting.popleft()
        trial = None if self._exhausted or self._remaining == 0 else self._source.next_trial()
        self._exhausted = self._exhausted or trial is None
        return trial, 0

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
