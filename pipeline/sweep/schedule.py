"""Which trial starts on which slot, which is tried again: decisions without clock, threads or files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.specs import State
from pipeline.sweep.trial import Outcome, Trial, TrialSource

TRANSIENT = ("host", "memory")
"""Causes of a failure that another try may not meet again."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A trial that is to be started now. ``tried`` counts earlier tries in this command."""

    trial: Trial
    slot: int
    tried: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a trial came out. ``before``: it was so already, nothing was started for it."""

    trial: Trial
    outcome: Outcome
    cause: str = ""
    before: bool = False


class Schedule:
    """A slot takes the next trial the moment that it is free: nobody waits for the slowest of a batch.

    ``settled`` says how a trial stands that needs no start (finished before, failed for good), or None.
    """

    def __init__(
        self, source: TrialSource, *, slots: int, retries: int, settled: Callable[[Trial], Ended | None]
    ) -> None:
        self._source, self._retries, self._settled = source, retries, settled
        self._free = deque(range(slots))
        self._slots = slots
        self._again: deque[tuple[Trial, int]] = deque()
        self._running: dict[int, Start] = {}
        self._exhausted = self._halted = False
        self.ended: list[Ended] = []

    def next(self) -> Start | None:
        """What to start now; None while no slot is free, nothing is left, or the next one's very run is under way."""
        while self._free and not self._halted:
            trial, tried = self._take()
            if trial is None:
                return None
            if trial.key is not None and any(trial.key == other.key for other in self.running):
                self._again.appendleft((trial, tried))  # the same run: what becomes of it holds for both
                return None
            known = self._settled(trial)
            if known is not None:
                self._tell(known)
                continue
            start = Start(trial=trial, slot=self._free.popleft(), tried=tried)
            self._running[trial.number] = start
            return start
        return None

    def _take(self) -> tuple[Trial | None, int]:
        if self._again:
            return self._again.popleft()
        trial = None if self._exhausted else self._source.next_trial()
        self._exhausted = self._exhausted or trial is None
        return trial, 0

    @property
    def running(self) -> list[Trial]:
        """The trials under way."""
        return [start.trial for start in self._running.values()]

    def freed(self, slot: int) -> None:
        """The slot's hosts have nothing to do any more; its trial may still be completing."""
        if slot not in self._free:
            self._free.append(slot)

    def finished(self, start: Start, outcome: Outcome, cause: str = "") -> bool:
        """A trial has ended; True when it will be tried again.

        A slot on which a host failed is given up while there is another one.
        """
        del self._running[start.trial.number]
        if cause == "host" and self._slots > 1:
            self._slots -= 1
            if start.slot in self._free:
                self._free.remove(start.slot)
        elif not any(other.slot == start.slot for other in self._running.values()):
            self.freed(start.slot)
        if outcome.state is State.FAILED and cause in TRANSIENT and start.tried < self._retries:
            self._again.append((start.trial, start.tried + 1))
            return True
        self._tell(Ended(trial=start.trial, outcome=outcome, cause=cause))
        return False

    @property
    def slots_left(self) -> int:
        """Slots that were not given up."""
        return self._slots

    def halt(self) -> None:
        """Start nothing more."""
        self._halted = True

    @property
    def done(self) -> bool:
        """Nothing runs and nothing will be started."""
        return not self._running and (self._halted or (self._exhausted and not self._again))

    def _tell(self, ended: Ended) -> None:
        self.ended.append(ended)
        self._source.tell(ended.trial, ended.outcome)
