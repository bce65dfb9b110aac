"""Draw the live view of a run or of a sweep with rich, on a terminal's stderr below the lines written there.

The functions here are pure: state, time and size in, text out. ``screen.py`` calls them once a second.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.core.printable import printable
from pipeline.core.specs import State
from pipeline.core.tables import counted, file_size, folded, quantity
from pipeline.live.state import HostState, RunState
from pipeline.live.sweep_state import SweepState, estimate_left_s
from trainers.contract.beats import Phase, phase_words


class _View(NamedTuple):
    """What rich draws in each frame: the view of ``state()`` at that time, in the terminal's size at that time."""

    state: Callable[[], RunState | SweepState]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield view(self.state(), time.monotonic(), *console.size)


@contextmanager
def shown(state: Callable[[], RunState | SweepState], *, colours: bool) -> Iterator[Live]:
    """Show the view of ``state()`` within the context, then remove it. Raises OSError: the terminal is gone."""
    console = Console(
        file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True,
        color_system="auto" if colours else None,
    )  # fmt: skip
    live = Live(
        _View(state), console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )  # fmt: skip
    with live:
        console.show_cursor(True)  # rich has hidden it, and after Ctrl-Z or kill -9 it would stay hidden
        yield live


def print_above(live: Live, lines: Iterable[str]) -> None:
    """Write lines above the view, without sequences that would move the cursor, and redraw the view."""
    live.console.print(Text("\n").join(Text.from_ansi(line) for line in lines))


def view(state: RunState | SweepState, now: float, width: int, height: int) -> RenderableType:
    """Return the view of a run or a sweep. ``now``: of ``time.monotonic()``; the size is in columns and lines."""
    if isinstance(state, RunState):
        return run_view(state, now, width=width, height=height)
    return sweep_view(state, now, width=width, height=height)


Part = tuple[str, str]
"""A piece of a line and its style ('' for none)."""
_FULL, _EMPTY = "━", "─"
_METRIC_NAMES = {"val/accuracy": "val accuracy", "test/accuracy": "test accuracy"}
_HEAD_LINES = 5  # lines of the view that are not hosts
_MOST_NAME, _LEAST_NAME = 24, 8  # columns of a host's name
_STATE_WIDTH = 26  # columns of what a host does, with its seconds: "computing gradients 1234 s"
_MOST_WAITED = 3  # lines for what the command waits for
_SHORT = {phase_words(Phase.WAITING.value): "in a collective"}  # fits into _STATE_WIDTH with its seconds
_WAITS_S = 10.0  # if a rank does one thing for longer, the seconds are shown
_USUAL_LAG_S = 3.0  # hosts report each second, but not at the same moment
_USAGE_COLUMNS = {"busy": 9, "memory": 18, "network in / out": 25}
"""The columns to the right of a host's state: title → width."""


# ------------------------------------------------------------------------------------- parts of every view
def line(parts: Iterable[Part]) -> Text:
    """Return one line, cut at the view's width. Its text is never parsed as rich's markup."""
    return Text.assemble(*((printable(text), style) for text, style in parts), no_wrap=True, overflow="ellipsis")


def table(columns: Mapping[str, int | None], rows: Iterable[Iterable[Text]]) -> Table:
    """Return a table. ``columns``: title → width, None: that of the longest cell. Longer cells are cut."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title, width in columns.items():
        grid.add_column(Text(title), width=width, no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*row)
    return grid


def bar(done: float, width: int) -> list[Part]:
    """Return a progress bar; ``done`` from 0 to 1."""
    full_width = round(done * width)
    return [(_FULL * full_width, "green"), (_EMPTY * (width - full_width), "dim")]


def time_left(seconds: float) -> str:
    """Return ``about 25 min left``, rounded as precisely as an estimate deserves."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60:02d} min left"


def figure(name: str, value: float) -> str:
    """Return ``val accuracy 0.9889``, ``loss nan``, ``loss 3.37e-05``."""
    needs_exponent = abs(value) >= 1000 or 0 < abs(value) < 1e-3
    return f"{_METRIC_NAMES.get(name, name)} {quantity(name, value, '.4g' if needs_exponent else '.4f')}".strip()


# ------------------------------------------------------------------------------------- a run
def run_view(state: RunState, now: float, *, width: int, height: int) -> RenderableType:
    """Return the view of one run, not larger than the terminal's ``width`` columns and ``height`` lines."""
    width = max(20, width - 1)  # on some terminals a line that fills the last column adds an empty one
    progress = _progress(state, now, width)
    lines = [line(_headline(state)), *map(line, progress), line(_figures(state))]
    notes = line(_notes(state, now))
    lines += [notes] if notes.plain else []
    return Constrain(Group(*lines, *_hosts(state, width, max(1, height - _HEAD_LINES - len(progress)))), width)


def _headline(state: RunState) -> Iterator[Part]:
    yield f"run {state.key}", "bold"
    yield f"  {state.title}", ""
    if state.attempt > 1:
        yield f"  attempt {state.attempt}", "yellow"
    if state.hosts:
        yield f"  {counted(state.world_size, 'rank')} on {counted(len(state.hosts), 'host')}", "dim"


def _progress(state: RunState, now: float, width: int) -> list[list[Part]]:
    """Return the line with the progress bar over all epochs.

    Before the first step, after the last one, and if the number of steps is unknown: lines that say what is awaited.
    """
    epoch, step = f"epoch {epoch_text(state)} ", f" step {state.current_step:,}/{state.steps:,}  "
    if not (state.steps and state.hosts):
        return _waited(state, f"step {state.current_step:,}  " if state.current_step else "", width)
    if state.step >= state.steps:
        return _waited(state, f"{epoch}{step}", width)
    remaining = "" if state.left_s is None else time_left(max(0.0, state.left_s - (now - state.left_estimated_at)))
    tail = f" {state.done_fraction:>4.0%} {step}{remaining}".rstrip()
    room = width - len(epoch) - len(tail)
    progress_bar = bar(state.done_fraction, min(40, room)) if room >= 8 else []
    return [[(epoch, ""), *progress_bar, (tail, "")]]


def _waited(state: RunState, position: str, width: int) -> list[list[Part]]:
    """Return ``position`` and what the command waits for: on one line if it fits, else folded below ``position``."""
    doing = f"{state.doing.what} ({state.doing.for_s:.0f} s)" if state.doing.for_s >= 1 else state.doing.what
    if cell_len(position) + cell_len(doing) <= width:
        return [[(position, ""), (doing, "cyan")]]
    lines: list[list[Part]] = [[(position.rstrip(), "")]] if position else []
    return lines + [[(line, "cyan")] for line in folded(doing, width).splitlines()[:_MOST_WAITED]]


def epoch_text(state: RunState) -> str:
    """Return the current epoch: ``3/20``."""
    epoch, last = state.epoch, state.epochs
    if state.steps_per_epoch:
        epoch = min(state.current_step, state.steps - 1) // state.steps_per_epoch + 1
        last = -(-state.steps // state.steps_per_epoch)  # rounded up: trainer.max_steps may end within an epoch
    return f"{epoch}/{last}" if last else str(epoch)


def _figures(state: RunState) -> Iterator[Part]:
    shown = {name: value for name, value in state.metrics.items() if name in ("train/loss", "val/accuracy")}
    if not shown:  # a script has metrics of its own
        shown = dict(sorted(state.metrics.items())[:4])
    for name, value in shown.items():
        text = figure("loss" if name == "train/loss" else name, value)
        yield f"{text}  ", "" if math.isfinite(value) else "bold red"
    if state.images_per_s is not None:
        yield f"{state.images_per_s:,.0f} images/s  ", ""
    if not shown:
        yield "no metric yet", "dim"


def _notes(state: RunState, now: float) -> Iterator[Part]:
    if state.saved_step:
        yield f"checkpoint of step {state.saved_step:,}, {now - state.saved_at:.0f} s ago  ", "dim"
    if state.warnings:
        yield f"{counted(state.warnings, 'warning')}: {state.warning}", "yellow"


def _hosts(state: RunState, width: int, most: int) -> Iterator[RenderableType]:
    """Yield a table of the hosts. If only ``most`` lines fit, it has the ended hosts and those furthest behind."""
    if not state.hosts:
        return
    names = [*state.hosts]
    if len(names) > most:
        by_urgency = sorted(names, key=lambda name: (not state.hosts[name].end, state.hosts[name].step))
        chosen = {*by_urgency[: max(1, most - 1)]}  # one line is kept for the number of the others
        names = [name for name in names if name in chosen]  # in the cluster's order, so that lines don't jump
    longest = max(4, *(cell_len(printable(name)) for name in state.hosts))
    name_width = min(_MOST_NAME, longest, max(_LEAST_NAME, width - 2 - _STATE_WIDTH))
    columns = _columns(width, name_width)
    cells = {name: _cells(state, state.hosts[name]) for name in names}
    rows = ([Text(printable(name), "bold"), *(cells[name][title] for title in columns)] for name in names)
    yield table({"host": name_width, **columns}, rows)
    if hidden := len(state.hosts) - len(names):
        behind = max(_behind(state, host) for host in state.hosts.values())
        lag = f"; the slowest is {behind:,} steps behind" if behind else ""
        yield line([(f"and {counted(hidden, 'more host')}{lag}", "dim")])


def _columns(width: int, name_width: int) -> dict[str, int]:
    """Return the columns that fit beside the hosts' names: title → width."""
    columns = {"state": _STATE_WIDTH}
    room = width - name_width - 2 - _STATE_WIDTH
    for title, column_width in _USAGE_COLUMNS.items():
        room -= 2 + column_width  # two spaces stand between columns
        if room < 0:
            break
        columns[title] = column_width
    return columns


def _cells(state: RunState, host: HostState) -> dict[str, Text]:
    """Return the cells of a host: title → text. Busy and memory are those of its GPUs, or without GPUs its own."""
    cells, usage = {"state": _state(state, host)}, host.usage
    if usage is None:
        return cells | {title: Text("-") for title in _USAGE_COLUMNS}
    gpus, parts = usage.gpus, usage.gpus or (usage,)
    used, total = sum(part.memory_bytes for part in parts), sum(part.memory_total_bytes for part in parts)
    busy = f"gpu {sum(gpu.busy for gpu in gpus) / len(gpus):.0%}" if gpus else f"cpu {usage.cpu:.0%}"
    network = f"{file_size(round(usage.received_per_s))}/s / {file_size(round(usage.sent_per_s))}/s"
    texts = (busy, f"{file_size(used)} of {total / 1e9:.0f} GB", network)
    return cells | {title: Text(text) for title, text in zip(_USAGE_COLUMNS, texts, strict=True)}


def _behind(state: RunState, host: HostState) -> int:
    """Return how many steps the host is behind the furthest one; 0 if the delay of its reports explains that."""
    if host.end or host.steps_per_s is None:
        return 0
    furthest = max(other.step for other in state.hosts.values())
    # a host's report may be old, but it has begun each step that rank 0 has finished
    behind = furthest - max(host.step, state.step)
    return behind if behind > max(1.0, _USUAL_LAG_S * host.steps_per_s) else 0


def _state(state: RunState, host: HostState) -> Text:
    if host.end:
        return Text(host.end, "green" if host.end == "ended" else "bold red")
    doing = _SHORT.get(host.doing, host.doing)
    if host.for_s >= _WAITS_S:
        return Text(printable(f"{doing} {host.for_s:.0f} s"), "yellow")
    behind = _behind(state, host)
    return Text(printable(f"{behind:,} behind: {doing}" if behind else doing), "yellow" if behind else "")


# ------------------------------------------------------------------------------------- a sweep
_SWEEP_HEAD_LINES = 3
_MOST_WORDS = 40  # columns of the overrides in which trials differ
_BAR_WIDTH = 16
_LEAST_ROOM = 5  # columns; in fewer it isn't shown what a trial does
_STATE_AND_EPOCH = 25  # columns of state and epoch, and of the gaps between all columns
_PROGRESS_WIDTH = 30  # columns of the longest text of what a trial does: "making the evaluation report"
_BAD_ENDS = (State.FAILED, State.KILLED, State.PRUNED)


def sweep_view(state: SweepState, now: float, *, width: int, height: int) -> RenderableType:
    """Return the view of a sweep, not larger than the terminal: a table of trials, the running ones first of all."""
    width = max(20, width - 1)
    counts = [*_counts(state, now)]
    counts_width = sum(len(text) for text, _ in counts)
    name = f"sweep {state.name}: "
    if len(name) + counts_width > width:  # counts and the time left are more important than the name
        name = "sweep: "
    bar_width = width - counts_width - len(name) - 2
    progress = (
        [*bar(state.done / max(1, state.total), min(_BAR_WIDTH, bar_width)), ("  ", "")] if bar_width >= 8 else []
    )
    lines = [line([(name, "bold"), *progress, *counts])]
    if state.best is not None:
        lines.append(line([(f"best so far {figure(state.metric, state.best.value)}: {state.best.words}", "green")]))
    return Constrain(Group(*lines, *_trials(state, width, max(1, height - _SWEEP_HEAD_LINES - 1))), width)


def _counts(state: SweepState, now: float) -> Iterator[Part]:
    yield f"{state.done} of {state.total} done, {len(state.running)} running", ""
    if (remaining_s := estimate_left_s(state, now)) is not None:
        yield f", {time_left(remaining_s)}", ""
    for end in _BAD_ENDS:
        if number := sum(trial.state is end for trial in state.ended.values()):
            yield f", {number} {end.lower()}", "bold red" if end is State.FAILED else "yellow"


def _trials(state: SweepState, width: int, most_lines: int) -> Iterator[RenderableType]:
    """Yield the table of trials, and a line with the number of trials for which there is no room."""
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
    if room - len(title) < _PROGRESS_WIDTH:  # a long title would leave no room for what a trial does
        title = "best  "
    columns = {"trial": number_width, "state": 8, "differs in": words_width, "epoch": 7, title: None, "": None}
    grid = table(columns, (_row(state, number, words[number], room - len(title)) for number in numbers))
    grid.columns[0].justify = "right"
    yield grid
    if hidden := len(state.ended) + len(state.running) - len(numbers):
        yield line([(f"and {counted(hidden, 'more trial')}", "dim")])


def _shown_trials(state: SweepState, most_lines: int) -> list[int]:
    """Return the numbers of the trials to show: the running ones, then the last ones that ended."""
    rows = most_lines - 1  # below the table's header
    running = sorted(state.running)
    if len(running) > rows:
        running = running[: max(1, rows - 1)]
    are_hidden = len(state.ended) + len(state.running) > rows  # their number then takes a line
    free = max(0, rows - len(running) - are_hidden)
    return sorted([*running, *([*state.ended][-free:] if free else [])])


def _row(state: SweepState, number: int, words: str, room: int) -> list[Text]:
    """Return a trial's cells. ``room``: how many columns there are for what it does."""
    if (trial := state.running.get(number)) is not None:
        state_text, epoch, best_value = Text("running", "cyan"), epoch_text(trial.run), trial.best
        progress = line(_trial_progress(trial.run, room) if room >= _LEAST_ROOM else ())
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


def _trial_progress(run: RunState, room: int) -> Iterator[Part]:
    """Yield a trial's bar and as many figures as fit; before its first step and after its last, what it waits for."""
    if not (run.steps and run.current_step) or run.step >= run.steps:
        yield run.doing.what, "cyan"
        return
    if room >= _BAR_WIDTH + 24:
        yield from bar(run.done_fraction, _BAR_WIDTH)
        room -= _BAR_WIDTH
    for text, style in _trial_figures(run):
        room -= len(text)
        if room < 0:
            return
        yield text, style


def _trial_figures(run: RunState) -> Iterator[Part]:
    yield f" {run.done_fraction:>4.0%}", ""
    if (loss := run.loss) is not None:
        yield f"  {figure('loss', loss)}", "" if loss == loss else "bold red"
    if run.warnings:
        yield f"  {counted(run.warnings, 'warning')}", "yellow"
    if run.images_per_s is not None:
        yield f"  {run.images_per_s:,.0f} images/s", ""
