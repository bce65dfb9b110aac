"""The state of a sweep as rich draws it. Pure."""

from __future__ import annotations

import math
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
from pipeline.live.sweep_state import SweepState, left_s

_MOST_WORDS = 40
_BAR = 16
_LEAST_FIGURE = 5
_HEAD_LINES = 3
_BEFORE = 25  # columns of state, epoch and what stands between the columns
_STANDING = 30  # columns that what a trial does may take: "making the evaluation report"
_BAD = (State.FAILED, State.KILLED, State.PRUNED)


def sweep_view(state: SweepState, now: float, *, width: int, height: int) -> Group:
    """The view of a sweep, not larger than the terminal: a table of trials, with those under way in any case.

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
        if number := sum(trial.state is which for trial in state.ended.values()):
            yield f", {number} {which.lower()}", "bold red" if which is State.FAILED else "yellow"


def _trials(state: SweepState, width: int, most: int) -> Iterator[Text]:
    """A head and a line a trial: all that are under way, then as many of those that ended last as there is room for."""
    running = sorted(state.running)[: max(1, most - 2)] if len(state.running) > most - 1 else sorted(state.running)
    room = max(0, most - 1 - len(running) - (len(state.ended) + len(state.running) > most - 1))
    shown = sorted([*running, *([*state.ended][-room:] if room else [])])
    if not shown:
        return
    words = {number: _words(state, number) for number in shown}
    names = max(len("differs in"), *(cell_len(printable(text)) for text in words.values()))
    names = min(names, _MOST_WORDS, max(8, width // 2 - 8))
    digits = max(len("trial"), len(str(shown[-1])))
    metric = _metric(state, width - digits - names - _BEFORE)
    titles = f"{'trial':>{digits}}  {'state':<8}  {'differs in':<{names}}  {'epoch':<7}  {metric}"
    yield line([(titles, "dim")], width)
    for number in shown:
        yield line(_row(state, number, words[number], (digits, names), width), width)
    if hidden := len(state.ended) + len(state.running) - len(shown):
        yield line([(f"and {counted(hidden, 'more trial')}", "dim")], width)


def _metric(state: SweepState, room: int) -> str:
    """The title above the best value, in short where what a trial does would be cut behind it."""
    title = f"best {state.metric.replace('/', ' ')}"
    return title if room - len(title) >= _STANDING else "best  "


def _words(state: SweepState, number: int) -> str:
    trial = state.running.get(number) or state.ended[number]
    return trial.words or f"trial {number}"


def _row(state: SweepState, number: int, words: str, sizes: tuple[int, int], width: int) -> Iterator[Part]:
    digits, names = sizes
    trial, over = state.running.get(number), state.ended.get(number)
    how, style = ("running", "cyan") if trial is not None or over is None else (over.state.lower(), _style(over.state))
    yield f"{number:>{digits}}  ", ""
    yield f"{how:<8}  ", style
    yield f"{fitted(words, names)}  ", "bold"
    value = trial.best if trial is not None else over.value if over is not None else math.nan
    epoch = epoch_of(trial.run) if trial is not None else str(over.epochs or "") if over is not None else ""
    yield f"{'' if epoch == '0' else epoch:<7}  ", ""
    shown = "" if math.isnan(value) else figure("", value).strip()
    title = _metric(state, width - digits - names - _BEFORE)
    room = width - digits - names - _BEFORE - len(title)
    if trial is None or room < _LEAST_FIGURE:
        yield shown, ""
        return
    yield f"{shown:<{len(title)}}  ", ""
    yield from _standing(trial.run, room)


def _style(state: State) -> str:
    return "green" if state is State.FINISHED else "bold red" if state is State.FAILED else "yellow"


def _standing(run: RunState, room: int) -> Iterator[Part]:
    """What there is room for: what matters most first; before the first step and after the last what is waited for."""
    if not (run.steps and run.current_step):
        yield run.doing.what, "cyan"
        return
    if run.step >= run.steps:
        yield run.doing.what, "cyan"
        return
    if room >= _BAR + 24:
        yield from bar(run.done, _BAR)
        room -= _BAR
    for text, style in _figures(run):
        room -= len(text)
        if room < 0:
            return
        yield text, style


def _figures(run: RunState) -> Iterator[Part]:
    yield f" {percent(run.done):>4}", ""
    if (loss := run.loss) is not None:
        yield f"  {figure('loss', loss)}", "" if loss == loss else "bold red"
    if run.warnings:
        yield f"  {counted(run.warnings, 'warning')}", "yellow"
    if run.images_per_s is not None:
        yield f"  {run.images_per_s:,.0f} images/s", ""
