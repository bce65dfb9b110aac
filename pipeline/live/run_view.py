"""The state of a run as rich draws it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from pipeline.core.printable import printable
from pipeline.core.tables import counted, file_size
from pipeline.live.cells import Part, bar, figure, fitted, line, percent, speed, time_left
from pipeline.live.run_state import HostState, RunState
from trainers.contract.beats import Phase, Usage, phase_words

_HEAD_LINES = 5  # all but the hosts
_MOST_NAME = 24
_LEAST_STATE, _MOST_STATE = 21, 26
_SHORT = {phase_words(Phase.WAITING.value): "in a collective"}  # which fits with its seconds
_WAITS_S = 10.0  # a rank that is longer at one thing is told with its seconds
_COLUMNS = {"step": 7, "images/s": 9, "busy": 9, "memory": 18, "network in / out": 25}
"""Behind the state: title → columns."""
_FIRST = ("step", "busy", "images/s", "memory", "network in / out")
"""Which are shown first where not all have room."""


def run_view(state: RunState, now: float, *, width: int, height: int) -> Group:
    """The view of one run, not larger than the terminal.

    Args:
        now: by the clock of the state's times.
        width, height: of the terminal, in columns and lines.
    """
    width = max(20, width - 1)  # a line that fills the last column moves some terminals on
    lines = [line(_headline(state), width), *_progress(state, now, width), line(_figures(state), width)]
    notes = line(_notes(state, now), width)
    lines += [notes] if notes.plain else []
    return Group(*lines, *_hosts(state, width, max(1, height - _HEAD_LINES - 1)))


def _headline(state: RunState) -> Iterator[Part]:
    yield f"run {state.key}", "bold"
    yield f"  {state.title}", ""
    if state.attempt > 1:
        yield f"  attempt {state.attempt}", "yellow"
    if state.hosts:
        yield f"  {counted(state.world_size, 'rank')} on {counted(len(state.hosts), 'host')}", "dim"


def _progress(state: RunState, now: float, width: int) -> Iterator[Text]:
    """The bar over all epochs; before the first step, after the last, or of unknown many, what is waited for."""
    waited = f" ({state.doing.for_s:.0f} s)" if state.doing.for_s >= 1 else ""
    if not (state.steps and state.hosts):
        step = f"step {state.current_step:,}  " if state.current_step else ""
        yield line([(step, ""), (f"{state.doing.what}{waited}", "cyan")], width)
        return
    if state.step >= state.steps:
        steps = f"epoch {epoch_of(state)}  step {state.current_step:,}/{state.steps:,}  "
        yield line([(steps, ""), (f"{state.doing.what}{waited}", "cyan")], width)
        return
    words = f"epoch {epoch_of(state)} "
    left_s = left(state, now)
    tail = f" {percent(state.done):>4}  step {state.current_step:,}/{state.steps:,}"
    tail += f"  {time_left(left_s)}" if left_s is not None else ""
    room = width - len(words) - len(tail)
    parts = bar(state.done, min(40, room)) if room >= 8 else []
    yield line([(words, ""), *parts, (tail, "")], width)


def epoch_of(state: RunState) -> str:
    """``3/20``: the epoch that is under way."""
    epoch = state.epoch
    if state.steps_per_epoch:
        epoch = min(state.current_step, state.steps - 1) // state.steps_per_epoch + 1
    last = -(-state.steps // state.steps_per_epoch) if state.steps_per_epoch else state.epochs
    return f"{epoch}/{last}" if last else str(epoch)


def left(state: RunState, now: float) -> float | None:
    """Seconds until the last step, as far as anybody knows."""
    return None if state.left_s is None else max(0.0, state.left_s - (now - state.left_at))


def _figures(state: RunState) -> Iterator[Part]:
    """Loss, accuracy and speed; of a script its first metrics."""
    shown = {name: value for name, value in state.metrics.items() if name in ("train/loss", "val/accuracy")}
    if not shown:
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


def _hosts(state: RunState, width: int, most: int) -> Iterator[Text]:
    """A line for each host; where not all have room, those that are furthest behind."""
    if not state.hosts:
        return
    name_width = min(_MOST_NAME, max(4, *(cell_len(printable(name)) for name in state.hosts)))
    columns = _columns(width, name_width)
    titles = "".join(f"  {title:<{size}}" for title, size in columns)
    yield line([(f"{'host':<{name_width}}{titles}", "dim")], width)
    names = [*state.hosts]
    if len(names) > most:
        first = sorted(names, key=lambda name: (not state.hosts[name].over, state.hosts[name].step))[: max(1, most - 1)]
        names = [name for name in names if name in set(first)]
    for name in names:
        yield line(_row(state, name, name_width, columns), width)
    if hidden := len(state.hosts) - len(names):
        steps = [_step(state, host) for host in state.hosts.values()]
        yield line(
            [(f"and {counted(hidden, 'more host')}; all are at steps {min(steps)} to {max(steps)}", "dim")], width
        )


def _columns(width: int, name_width: int) -> list[tuple[str, int]]:
    """Title and columns of what the terminal has room for beside the state."""
    room, shown = width - name_width - 2 - _LEAST_STATE, set[str]()
    for title in _FIRST:
        if room < 2 + _COLUMNS[title]:
            break
        room -= 2 + _COLUMNS[title]
        shown.add(title)
    state = min(_MOST_STATE, _LEAST_STATE + max(0, room))
    return [("state", state), *((title, size) for title, size in _COLUMNS.items() if title in shown)]


def _row(state: RunState, name: str, name_width: int, columns: list[tuple[str, int]]) -> Iterator[Part]:
    host = state.hosts[name]
    yield fitted(name, name_width), "bold"
    cells = _cells(state, host)
    for title, size in columns:
        text, style = cells[title]
        yield f"  {fitted(text, size)}", style


def _cells(state: RunState, host: HostState) -> dict[str, Part]:
    """Column → what stands in it."""
    usage = host.usage
    return {
        "state": _state(host),
        "step": (f"{_step(state, host):,}" if host.step else "-", ""),
        "images/s": (_images_per_s(state, host), ""),
        "busy": (_busy(usage), ""),
        "memory": (_memory(usage), ""),
        "network in / out": (f"{speed(usage.received_per_s)} / {speed(usage.sent_per_s)}" if usage else "-", ""),
    }


def _step(state: RunState, host: HostState) -> int:
    """What rank 0 has finished every host has begun; a host itself tells once a second."""
    return host.step if host.over else max(host.step, state.step)


def _state(host: HostState) -> Part:
    if host.over:
        return host.over, "green" if host.over == "ended" else "bold red"
    waits = f" {host.for_s:.0f} s" if host.for_s >= _WAITS_S else ""
    return f"{_SHORT.get(host.doing, host.doing)}{waits}", "yellow" if waits else ""


def _images_per_s(state: RunState, host: HostState) -> str:
    """The host's own share, of the steps that it makes."""
    if not (state.batch and host.steps_per_s is not None and state.world_size):
        return "-"
    return f"{host.steps_per_s * state.batch * host.ranks / state.world_size:,.0f}"


def _busy(usage: Usage | None) -> str:
    if usage is None:
        return "-"
    if usage.gpus:
        return f"gpu {percent(sum(gpu.busy for gpu in usage.gpus) / len(usage.gpus))}"
    return f"cpu {percent(usage.cpu)}"


def _memory(usage: Usage | None) -> str:
    """Of the GPUs, all together, where there are any."""
    if usage is None:
        return "-"
    parts = usage.gpus or (usage,)
    used, total = sum(part.memory_bytes for part in parts), sum(part.memory_total_bytes for part in parts)
    return f"{file_size(used)} of {total / 1e9:.0f} GB"
