"""What the live view knows of a sweep, and how its events and those of its trials change it: times are passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.core.specs import State
from pipeline.live.state import FolderNews, RunState, after
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.trial import TrialBegan, TrialEnded, words_of_trial


@dataclass(frozen=True, kw_only=True)
class TrialState:
    """A running trial."""

    words: str  # the overrides that set it apart: lr=0.1 seed=2
    began: float
    run: RunState
    best: float = math.nan  # value of the sweep's metric so far; NaN: none


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """An ended trial, perhaps from an earlier command. ``epochs``: how far it came (0: unknown)."""

    words: str
    state: State
    value: float = math.nan
    epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """The state of a sweep, with its trials by their numbers."""

    name: str
    total: int
    at_once: int
    metric: str
    maximize: bool = True
    ended: Mapping[int, EndedTrial] = field(default_factory=lambda: MappingProxyType({}))
    running: Mapping[int, TrialState] = field(default_factory=lambda: MappingProxyType({}))
    took_s: tuple[float, ...] = ()  # the durations of finished trials
    best: EndedTrial | None = None  # the one with the best value so far

    @property
    def done(self) -> int:
        """The number of ended trials, whatever their end."""
        return len(self.ended)


def after_trial_event(state: SweepState, event: TrialBegan | TrialEnded, now: float) -> SweepState:
    """Return the state after a trial has begun or ended; ``now`` in seconds of a monotonic clock."""
    if isinstance(event, TrialBegan):
        run = RunState(key=event.key, title="")
        trial = TrialState(words=words_of_trial(event.chosen), began=now, run=run)
        running = {**state.running, event.number: trial}
        ended = {number: trial for number, trial in state.ended.items() if number != event.number}  # it is tried again
        return replace(state, running=running, ended=ended)
    running = {number: trial for number, trial in state.running.items() if number != event.number}
    known = state.running.get(event.number)  # None: it ended before this command looked
    if event.again:
        return replace(state, running=running)
    took_s = (now - known.began,) if known is not None and event.state is State.FINISHED else ()
    value = event.metrics.get(state.metric, math.nan)
    ended_trial = EndedTrial(
        words=words_of_trial(event.chosen),
        state=event.state,
        value=_best_of(state, value, math.nan if known is None else known.best),
        epochs=0 if known is None else known.run.epoch,
    )
    ended = {**state.ended, event.number: ended_trial}
    best = _better(state, replace(ended_trial, value=value))
    return replace(state, running=running, ended=ended, took_s=(*state.took_s, *took_s), best=best)


def after_run_event(state: SweepState, number: int, event: object, now: float) -> SweepState:
    """Return the state after an event of a running trial; events of ended trials change nothing."""
    trial = state.running.get(number)
    if trial is None:
        return state
    value = event.metrics.get(state.metric, math.nan) if isinstance(event, MetricsRow) else math.nan
    trial = replace(trial, run=after(trial.run, event, now), best=_best_of(state, trial.best, value))
    return replace(state, running={**state.running, number: trial})


def left_s(state: SweepState, now: float) -> float | None:
    """Return the estimated seconds until the last trial ends, by the durations so far; None: unknown yet."""
    done = {number: trial.run.done for number, trial in state.running.items()}  # from 0 to 1
    times_s = [*state.took_s] or [
        (now - trial.began) / done[number] for number, trial in state.running.items() if done[number] >= 0.05
    ]
    if not times_s:
        return None
    usual_s = sum(times_s) / len(times_s)
    remaining_s = [max(0.0, usual_s * (1 - done[number])) for number in state.running]
    waiting = max(0, state.total - state.done - len(state.running))
    if not waiting:
        return max(remaining_s, default=0.0)
    return max(usual_s, (sum(remaining_s) + waiting * usual_s) / max(1, state.at_once))


def _best_of(state: SweepState, *values: float) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return (max if state.maximize else min)(numbers, default=math.nan)


def _better(state: SweepState, candidate: EndedTrial) -> EndedTrial | None:
    if math.isnan(candidate.value):
        return state.best
    best = math.nan if state.best is None else state.best.value
    return candidate if _best_of(state, candidate.value, best) != best else state.best


class SweepPicture:
    """The state of a sweep from events (``take``): the sweep's, and pairs of a trial's number and its event."""

    def __init__(self, state: SweepState, runs_dir: Path) -> None:
        self.state = state
        self._runs_dir = runs_dir
        self._news = {number: FolderNews(runs_dir / trial.run.key) for number, trial in state.running.items()}

    def take(self, event: Any, now: float) -> None:
        if isinstance(event, TrialBegan | TrialEnded):
            self.state = after_trial_event(self.state, event, now)
            self._news.pop(event.number, None)
            if isinstance(event, TrialBegan):
                self._news[event.number] = FolderNews(self._runs_dir / event.key)
        elif type(event) is tuple:
            self.state = after_run_event(self.state, event[0], event[1], now)

    def look(self, now: float) -> None:
        for number, news in self._news.items():
            for event in news.look():
                self.state = after_run_event(self.state, number, event, now)
