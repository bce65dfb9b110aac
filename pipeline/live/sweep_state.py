"""The state of a sweep that the live view draws, and how it changes by events of the sweep and of its trials.

As in ``state.py``, the functions ``after_…`` are pure and get the current time from the caller. A ``SweepPicture``
holds the newest state and reads the run folders of running trials.
"""

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

    words: str  # the overrides in which trials differ: lr=0.1 seed=2
    began: float
    run: RunState
    best: float = math.nan  # the best value of the sweep's metric so far; NaN: none


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """An ended trial, perhaps of an earlier command."""

    words: str
    state: State
    value: float = math.nan  # of the sweep's metric
    epochs: int = 0  # how far it came; 0: unknown


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """The state of a sweep, with its trials by their numbers."""

    name: str
    total: int  # number of trials
    at_once: int  # how many trials run at the same time
    metric: str  # by which trials are compared
    maximize: bool = True
    ended: Mapping[int, EndedTrial] = field(default_factory=lambda: MappingProxyType({}))
    running: Mapping[int, TrialState] = field(default_factory=lambda: MappingProxyType({}))
    took_s: tuple[float, ...] = ()  # the durations of finished trials
    best: EndedTrial | None = None  # the ended trial with the best value so far

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
        ended = {number: trial for number, trial in state.ended.items() if number != event.number}  # it runs again
        return replace(state, running=running, ended=ended)
    running = {number: trial for number, trial in state.running.items() if number != event.number}
    if event.again:  # neither an end nor a result: it will be started once more
        return replace(state, running=running)
    was_running = state.running.get(event.number)  # None: it ended before this command looked
    took_s = (now - was_running.began,) if was_running is not None and event.state is State.FINISHED else ()
    value = event.metrics.get(state.metric, math.nan)
    ended_trial = EndedTrial(
        words=words_of_trial(event.chosen),
        state=event.state,
        # a trial without a result, such as a pruned one, is shown with the best value that it logged
        value=_best_of(state, value, math.nan if was_running is None else was_running.best),
        epochs=0 if was_running is None else was_running.run.epoch,
    )
    ended = {**state.ended, event.number: ended_trial}
    best = _best_trial(state, replace(ended_trial, value=value))
    return replace(state, running=running, ended=ended, took_s=(*state.took_s, *took_s), best=best)


def after_run_event(state: SweepState, number: int, event: object, now: float) -> SweepState:
    """Return the state after an event of a running trial; events of ended trials change nothing."""
    trial = state.running.get(number)
    if trial is None:
        return state
    value = event.metrics.get(state.metric, math.nan) if isinstance(event, MetricsRow) else math.nan
    trial = replace(trial, run=after(trial.run, event, now), best=_best_of(state, trial.best, value))
    return replace(state, running={**state.running, number: trial})


_LEAST_DONE = 0.05  # part of a trial from which its duration can be estimated


def estimate_left_s(state: SweepState, now: float) -> float | None:
    """Estimate the seconds until the last trial ends, by the durations of trials so far; None: unknown yet."""
    running = state.running.values()
    # before the first trial has ended: the durations that running ones will have at their speed so far
    durations_s = [*state.took_s] or [
        (now - trial.began) / trial.run.done_fraction for trial in running if trial.run.done_fraction >= _LEAST_DONE
    ]
    if not durations_s:
        return None
    usual_s = sum(durations_s) / len(durations_s)
    remaining_s = [max(0.0, usual_s * (1 - trial.run.done_fraction)) for trial in running]
    waiting = max(0, state.total - state.done - len(state.running))
    if not waiting:
        return max(remaining_s, default=0.0)
    # all remaining work divided among the slots; at least one trial that hasn't begun takes its full time
    return max(usual_s, (sum(remaining_s) + waiting * usual_s) / max(1, state.at_once))


def _best_of(state: SweepState, *values: float) -> float:
    """Return the best of the values that are numbers; NaN if there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    return (max if state.maximize else min)(numbers, default=math.nan)


def _best_trial(state: SweepState, candidate: EndedTrial) -> EndedTrial | None:
    """Return the candidate if it is better than the best trial so far, else that trial."""
    if math.isnan(candidate.value):
        return state.best
    best = math.nan if state.best is None else state.best.value
    return candidate if _best_of(state, candidate.value, best) != best else state.best


class SweepPicture:
    """The content of a sweep's view (``screen.Picture``). An event of a trial comes as (trial number, event)."""

    def __init__(self, state: SweepState, runs_dir: Path) -> None:
        self.state = state
        self._runs_dir = runs_dir
        self._news = {number: FolderNews(runs_dir / trial.run.key) for number, trial in state.running.items()}

    def apply(self, event: Any, now: float) -> None:
        if isinstance(event, TrialBegan | TrialEnded):
            self.state = after_trial_event(self.state, event, now)
            self._news.pop(event.number, None)
            if isinstance(event, TrialBegan):
                self._news[event.number] = FolderNews(self._runs_dir / event.key)
        elif type(event) is tuple:
            self.state = after_run_event(self.state, event[0], event[1], now)

    def read_files(self, now: float) -> None:
        for number, news in self._news.items():
            for event in news.new_events():
                self.state = after_run_event(self.state, number, event, now)
