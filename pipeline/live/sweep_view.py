"""The view of a sweep: its progress, its best trial, and a line for each trial that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.text import Text

from pipeline.core.printable import printable
from pipeline.core.specs import State
from pipeline.core.tables import counted
from pipeline.live.run_view import Part, bar, epoch_text, figure, line, table, time_left
from pipeline.live.state import RunState, SweepState, left_s

_HEAD_LINES = 3
_MOST_WORDS = 40  # columns of the overrides that set a trial apart
_BAR_WIDTH = 16
_LEAST_ROOM = 5  # columns; in fewer, nothing tells what a trial does
_STATE_AND_EPOCH = 25  # columns of these two, and of the gaps between all columns
_PROGRESS_WIDTH = 30  # columns of the longest text of what a trial does: "making the evaluation report"
_BAD_ENDS = (State.FAILED, State.KILLED, State.PRUNED)


def sweep_view(state: SweepState, now: float, *, width: int, height: int) -> RenderableType:
    """Return the view of a sweep, not larger than the terminal: a table of trials, always with those that run."""
    width = max(20, width - 1)
    counts = [*_counts(state, now)]
    counts_width = sum(len(text) for text, _ in counts)
    name = f"sweep {state.name}: "
    name = name if len(name) + counts_width <= width else "sweep: "  # without room for the name and the time left
    bar_width = width - counts_width - len(name) - 2
    progress = (
        [*bar(state.done / max(1, state.total), min(_BAR_WIDTH, bar_width)), ("  ", "")] if bar_width >= 8 else []
    )
    lines = [line([(name, "bold"), *progress, *counts])]
    if state.best is not None:
        lines.append(line([(f"best so far {figure(state.metric, state.best.value)}: {state.best.words}", "green")]))
    return Constrain(Group(*lines, *_trials(state, width, max(1, height - _HEAD_LINES - 1))), width)


def _counts(state: SweepState, now: float) -> Iterator[Part]:
    yield f"{state.done} of {state.total} done, {len(state.running)} running", ""
    if (remaining_s := left_s(state, now)) is not None:
        yield f", {time_left(remaining_s)}", ""
    for end in _BAD_ENDS:
        if number := sum(trial.state is end for trial in state.ended.values()):
            yield f", {number} {end.lower()}", "bold red" if end is State.FAILED else "yellow"


def _trials(state: SweepState, width: int, most_lines: int) -> Iterator[RenderableType]:
    """Return a head and a line per trial: all running ones, then the last ended ones that fit."""
    numbers = _shown_trials(state, most_lines)
    if not numbers:
        return
    words = {
        number: (state.running.get(number) or state.ended[number]).words or f"trial {number}" for number in numbers
    }
    words_width = max(len("differs in"), *(cell_len(printable(text)) for text in words.values()))
    words_width = min(words_width, _MOST_WORDS, max(8, width // 2 - 8))
    number_width = max(len("trial"), len(str(numbers[-1])))
    room = width - number_width - words_width - _STATE_AND_EPOCH
    title = f"best {state.metric.replace('/', ' ')}"
    title = title if room - len(title) >= _PROGRESS_WIDTH else "best  "  # else what a trial does would be cut behind it
    columns = {"trial": number_width, "state": 8, "differs in": words_width, "epoch": 7, title: None, "": None}
    grid = table(columns, (_row(state, number, words[number], room - len(title)) for number in numbers))
    grid.columns[0].justify = "right"
    yield grid
    if hidden := len(state.ended) + len(state.running) - len(numbers):
        yield line([(f"and {counted(hidden, 'more trial')}", "dim")])


def _shown_trials(state: SweepState, most_lines: int) -> list[int]:
    """Return the numbers of the trials that fit below the head; a line is kept for the number of the others."""
    rows = most_lines - 1
    running = sorted(state.running)
    if len(running) > rows:
        running = running[: max(1, rows - 1)]
    are_hidden = len(state.ended) + len(state.running) > rows
    free = max(0, rows - len(running) - are_hidden)
    return sorted([*running, *([*state.ended][-free:] if free else [])])


def _row(state: SweepState, number: int, words: str, room: int) -> list[Text]:
    """Return a trial's cells. ``room``: columns for what it does."""
    if (trial := state.running.get(number)) is not None:
        state_text, epoch, best_value = Text("running", "cyan"), epoch_text(trial.run), trial.best
        progress = line(_progress(trial.run, room) if room >= _LEAST_ROOM else ())
    else:
        ended = state.ended[number]
        bad_style = "bold red" if ended.state is State.FAILED else "yellow"
        state_text = Text(ended.state.lower(), "green" if ended.state is State.FINISHED else bad_style)
        epoch, best_value, progress = str(ended.epochs), ended.value, Text()
    best = "" if math.isnan(best_value) else figure("", best_value)
    return [
        *(Text(str(number)), state_text, Text(printable(words), "bold")),
        *(Text("" if epoch == "0" else epoch), Text(best), progress),
    ]


def _progress(run: RunState, room: int) -> Iterator[Part]:
    """Yield a trial's bar and figures, as many as fit; before the first step and after the last, what it waits for."""
    if not (run.steps and run.current_step) or run.step >= run.steps:
        yield run.doing.what, "cyan"
        return
    if room >= _BAR_WIDTH + 24:
        yield from bar(run.done, _BAR_WIDTH)
        room -= _BAR_WIDTH
    for text, style in _trial_figures(run):
        room -= len(text)
        if room < 0:
            return
        yield text, style


def _trial_figures(run: RunState) -> Iterator[Part]:
    yield f" {run.done:>4.0%}", ""
    if (loss := run.loss) is not None:
        yield f"  {figure('loss', loss)}", "" if loss == loss else "bold red"
    if run.warnings:
        yield f"  {counted(run.warnings, 'warning')}", "yellow"
    if run.images_per_s is not None:
        yield f"  {run.images_per_s:,.0f} images/s", ""
