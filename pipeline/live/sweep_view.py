"""The state of a sweep as rich draws it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from pipeline.core.printable import printable
from pipeline.core.specs import State
from pipeline.core.tables import counted
from pipeline.live.cells import Part, bar, figure, fitted, line, percent, time_left
from pipeline.live.run_state import RunState
from pipeline.live.run_view import epoch_of
from pipeline.live.sweep_state import SweepState, TrialState, left_s

_MOST_WORDS = 40
_BAR = 16
_HEAD_LINES = 3
_BAD = (State.FAILED, State.KILLED, State.PRUNED)


def sweep_view(state: SweepState, now: float, *, width: int, height: int) -> Group:
    """The view of a sweep, not larger than the terminal: a line for each trial under way.

    Args:
        now: by the clock of the state's times.
        width, height: of the terminal, in columns and lines.
    """
    width = max(20, width - 1)
    lines = [line(_headline(state, now, width), width)]
    if state.best is not None:
        shown = figure(state.metric, state.best.value)
        lines.append(line([(f"best so far {shown}: {state.best.words}", "green")], width))
    return Group(*lines, *_trials(state, width, max(1, height - _HEAD_LINES - 1)))


def _headline(state: SweepState, now: float, width: int) -> list[Part]:
    """Without the sweep's name where that would push the time left out of the line."""
    parts = [*_counts(state, now)]
    name = f"sweep {state.name}: "
    return [(name if len(name) + sum(len(text) for text, _ in parts) <= width else "sweep: ", "bold"), *parts]


def _counts(state: SweepState, now: float) -> Iterator[Part]:
    yield f"{state.done} of {state.total} done, {len(state.running)} running", ""
    left = left_s(state, now)
    if left is not None:
        yield f", {time_left(left)}", ""
    for which in _BAD:
        if number := sum(how is which for how in state.ended.values()):
            yield f", {number} {which.lower()}", "bold red" if which is State.FAILED else "yellow"


def _trials(state: SweepState, width: int, most: int) -> Iterator[Text]:
    trials = sorted(state.running.items())
    if len(trials) > most:
        trials = trials[: most - 1]
    names = max((cell_len(printable(trial.words)) for _, trial in trials), default=0)
    names = min(names, _MOST_WORDS, width // 2)
    for number, trial in trials:
        yield line(_row(number, trial, names, width - names - 2), width)
    if hidden := len(state.running) - len(trials):
        yield line([(f"and {counted(hidden, 'more trial')}", "dim")], width)


def _row(number: int, trial: TrialState, names: int, room: int) -> Iterator[Part]:
    yield fitted(trial.words or f"trial {number}", names), "bold"
    yield "  ", ""
    yield from _standing(trial.run, room)


def _standing(run: RunState, room: int) -> Iterator[Part]:
    """What there is room for: what matters most first; before the first step and after the last what is waited for."""
    if not (run.steps and run.current_step):
        yield run.doing.what, "cyan"
        return
    if run.step >= run.steps:
        yield f"epoch {epoch_of(run)}  ", ""
        yield run.doing.what, "cyan"
        return
    if room >= 70:
        yield from bar(run.done, _BAR)
        room -= _BAR
    for text, style in _figures(run):
        room -= len(text)
        if room < 0:
            return
        yield text, style


def _figures(run: RunState) -> Iterator[Part]:
    yield f" {percent(run.done):>4}  epoch {epoch_of(run)}", ""
    for name, value in run.metrics.items():
        if name in ("train/loss", "val/accuracy"):
            yield f"  {figure('loss' if name == 'train/loss' else name, value)}", "" if value == value else "bold red"
    if run.warnings:
        yield f"  {counted(run.warnings, 'warning')}", "yellow"
    if run.images_per_s is not None:
        yield f"  {run.images_per_s:,.0f} images/s", ""
