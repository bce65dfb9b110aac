"""A trial of a sweep: its source, its outcome, the events of its begin and end, and its line in a log."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
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
from pipeline.runs import acceptance, journal
from pipeline.runs.contents import set_apart

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
class TrialEnded:
    """A trial ended, possibly before this command.

    ``detail``: the first line of the reason; ``again``: it will be retried.
    """

    number: int
    chosen: tuple[str, ...]
    state: State
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
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


def was_pruned(run: Run) -> bool:
    entries = journal.read(run.folder.journal)
    return bool(entries) and entries[-1].state is State.PRUNED


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
    return " ".join(set_apart(chosen, {}) or chosen)


class TrialLines:
    """Formats a line for each trial that a command has brought to a good end.

    A failure is reported elsewhere, together with the decision about a retry.

    Args:
        total: the number of trials.
        metric: the sweep's metric, such as val/accuracy.
    """

    def __init__(self, total: int, metric: str) -> None:
        self._total, self._metric = total, metric
        self._began: dict[int, tuple[float, str]] = {}
        self._done: set[int] = set()

    def of(self, event: object, now: float) -> str | None:
        """Return ``✓  5/18  lr=0.1 seed=2  val/accuracy 0.4440  12.5 s  (b20f8db36d40)``, or None.

        Args:
            event: of the sweep.
            now: seconds of a monotonic clock.
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
