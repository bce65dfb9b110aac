"""What a sweep is made of: trials, where they come from, and how each ended."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.cluster import launchers
from pipeline.cluster.failures import FULL_DISK
from pipeline.config.build import RunConfig
from pipeline.core.errors import HostError, PacelineError, TrainingError, os_reason
from pipeline.core.files import FULL, room_needed
from pipeline.core.specs import State
from pipeline.core.tables import duration
from pipeline.execution.run import Run
from pipeline.runs import acceptance, journal

_FULL = (*FULL, errno.EROFS)
_LONGEST = 300  # characters


def finished(run: Run, *, elsewhere: bool = False) -> Outcome:
    """The outcome of a finished run, from its result.json."""
    result, _ = acceptance.standing(run.folder)
    metrics = result.metrics if result is not None else {}
    return Outcome(state=State.FINISHED, metrics=metrics, elsewhere=elsewhere)


def was_pruned(run: Run) -> bool:
    entries = journal.read(run.folder.journal)
    return bool(entries) and entries[-1].state is State.PRUNED


def detail_of(error: PacelineError | OSError) -> str:
    """The first line of an error, as far as a table has room; of a HostError also the second, which names the first
    host. The run's journal has all of it."""
    text = error.what if isinstance(error, PacelineError) else os_reason(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    summary = ": ".join(lines[: 2 if isinstance(error, HostError) else 1])
    return summary if len(summary) <= _LONGEST else f"{summary[:_LONGEST]}…"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def cause_of(error: PacelineError | OSError) -> str:
    """``host``, ``memory``, ``disk`` (no other trial would fare better) or ``code``."""
    if isinstance(error, HostError):
        return "host"
    if isinstance(error, TrainingError):
        return error.cause
    reason = error if isinstance(error, OSError) else error.__cause__
    full = FULL_DISK.search(str(error)) or (isinstance(reason, OSError) and reason.errno in _FULL)
    return "disk" if full else "code"


def hint_of(error: PacelineError | OSError, run: Run) -> str:
    """What to do about a cause that stops the sweep: of a full disk here with the folder and what is free there."""
    if isinstance(error, TrainingError) and not launchers.capabilities(run.config.cluster).is_this_computer:
        return "make room there, then the same command"
    if isinstance(error, PacelineError) and error.hint is not None:
        return error.hint
    return room_needed(run.folder.path.parent)


def label(number: int, total: int) -> str:
    """How lines name a trial: ``trial  3`` among 12, as wide as the last one's."""
    return f"trial {number:>{len(str(max(0, total - 1)))}}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of a sweep: an ordinary run, and what sets it apart.

    ``number`` counts from 0 in the sweep's order. ``chosen`` are the overrides that the sweep chose for it,
    ``overrides`` all of them: `doit train` with these words is this very run. ``run`` is None while its data
    isn't fetched, so that it has no key.
    """

    number: int
    chosen: tuple[str, ...]
    overrides: tuple[str, ...]
    config: RunConfig
    run: Run | None

    @property
    def key(self) -> str | None:
        """The run key, once the data is in place."""
        return self.run.key.short if self.run is not None else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended: FINISHED with the flat ``metrics`` of result.json, PRUNED, or FAILED with its first line.

    ``elsewhere``: another command ran it, while this one waited for it.
    """

    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    elsewhere: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    """A trial is started."""

    number: int
    key: str
    chosen: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    """A trial has ended, perhaps before this command; ``detail``: the first line of why. ``again``: it will be tried
    once more."""

    number: int
    chosen: tuple[str, ...]
    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    again: bool = False


class TrialLines:
    """What a log is told of the trials of one command: a line when a trial starts, one when it has ended well.

    How it ended badly is said by who knows whether it is tried again.

    Args:
        total: how many trials there will be.
        metric: of the sweep, such as val/accuracy.
    """

    def __init__(self, total: int, metric: str) -> None:
        self._total, self._metric = total, metric
        self._began: dict[int, float] = {}

    def of(self, event: object, now: float) -> str | None:
        """None: nothing is to be said of it. ``now``: seconds of a clock that only goes forward."""
        if isinstance(event, TrialBegan):
            self._began[event.number] = now
            return f"{label(event.number, self._total)} started: {' '.join(event.chosen)} ({event.key})"
        if not isinstance(event, TrialEnded) or event.state is not State.FINISHED or event.number not in self._began:
            return None
        took = duration(now - self._began.pop(event.number))
        value = event.metrics.get(self._metric)
        figure = f" {self._metric} {value:.4f}," if value is not None else ""
        return f"{label(event.number, self._total)} finished:{figure} {took}"


class TrialSource(Protocol):
    """Where trials come from: a grid that is known beforehand, or a search that is asked as slots get free.

    All calls come from the scheduler's one thread. A trial that is tried again isn't asked for again;
    ``tell`` is called once for each, with its last outcome (also for one that was finished before).
    """

    @property
    def total(self) -> int:
        """How many trials there will be: fixed when the sweep begins."""
        ...

    def next_trial(self) -> Trial | None:
        """The next one in order; None when the total is reached."""
        ...

    def watch(self, running: Sequence[Trial]) -> None:
        """Called about once a second with the trials under way."""
        ...

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """A trial has ended."""
        ...
