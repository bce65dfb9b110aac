"""The state of a sweep under way, and its change by each event. Pure: times are passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pipeline.core.specs import State
from pipeline.live.run_state import RunEvent, RunState, after
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.trial import TrialBegan, TrialEnded, words_of_trial


@dataclass(frozen=True, kw_only=True)
class TrialState:
    """A running trial.

    ``words`` distinguish it: ``lr=0.1 seed=2``; ``best`` is its best value of the sweep's metric so far (NaN: none).
    """

    words: str
    began: float
    run: RunState
    best: float = math.nan


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """An ended trial, perhaps from an earlier command. ``epochs``: how far it came (0: unknown)."""

    words: str
    state: State
    value: float = math.nan
    epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """The state of a sweep.

    ``running`` and ``ended`` are keyed by trial number; ``took_s``: durations of trials that ran to their end; ``best``
    is the ended trial with the best value so far.
    """

    name: str
    total: int
    at_once: int
    metric: str
    maximize: bool = True
    ended: Mapping[int, EndedTrial] = field(default_factory=lambda: MappingProxyType({}))
    running: Mapping[int, TrialState] = field(default_factory=lambda: MappingProxyType({}))
    took_s: tuple[float, ...] = ()
    best: EndedTrial | None = None

    @property
    def done(self) -> int:
        """The number of ended trials, whatever their end."""
        return len(self.ended)


def after_trial_event(state: SweepState, event: TrialBegan | TrialEnded, now: float) -> SweepState:
    """Return the state after a trial has begun or ended; ``now`` in seconds of a monotonic clock."""
    if isinstance(event, TrialBegan):
        run = RunState(key=event.key, title="")
        trial = TrialState(words=words_of_trial(event.chosen), began=now, run=run)
        begun = {**state.running, event.number: trial}
        ended = {number: how for number, how in state.ended.items() if number != event.number}  # it is tried again
        return replace(state, running=begun, ended=ended)
    running = {number: trial for number, trial in state.running.items() if number != event.number}
    known = state.running.get(event.number)
    if event.again:
        return replace(state, running=running)
    took = (now - known.began,) if known is not None and event.state is State.FINISHED else ()
    value = event.metrics.get(state.metric, math.nan)
    over = EndedTrial(
        words=words_of_trial(event.chosen),
        state=event.state,
        value=_best_of(state, value, math.nan if known is None else known.best),
        epochs=0 if known is None else known.run.epoch,
    )
    ended = {**state.ended, event.number: over}
    best = _better(state, replace(over, value=value))
    return replace(state, running=running, ended=ended, took_s=(*state.took_s, *took), best=best)


def after_run_event(state: SweepState, number: int, event: RunEvent, now: float) -> SweepState:
    """Return the state after an event of a running trial; events of ended trials change nothing."""
    trial = state.running.get(number)
    if trial is None:
        return state
    value = event.metrics.get(state.metric, math.nan) if isinstance(event, MetricsRow) else math.nan
    trial = replace(trial, run=after(trial.run, event, now), best=_best_of(state, trial.best, value))
    return replace(state, running={**state.running, number: trial})


def left_s(state: SweepState, now: float) -> float | None:
    """Return the estimated seconds until the last trial ends, by the durations so far; None: unknown yet."""
    part = {number: trial.run.done for number, trial in state.running.items()}
    times = [*state.took_s] or [
        (now - trial.began) / part[number] for number, trial in state.running.items() if part[number] >= 0.05
    ]
    if not times:
        return None
    usual_s = sum(times) / len(times)
    rest = [max(0.0, usual_s * (1 - part[number])) for number in state.running]
    waiting = max(0, state.total - state.done - len(state.running))
    if not waiting:
        return max(rest, default=0.0)
    return max(usual_s, (sum(rest) + waiting * usual_s) / max(1, state.at_once))


def _best_of(state: SweepState, one: float, other: float) -> float:
    known = [value for value in (one, other) if not math.isnan(value)]
    return (max if state.maximize else min)(known, default=math.nan)


def _better(state: SweepState, candidate: EndedTrial) -> EndedTrial | None:
    if math.isnan(candidate.value):
        return state.best
    best = math.nan if state.best is None else state.best.value
    return candidate if _best_of(state, candidate.value, best) != best else state.best
