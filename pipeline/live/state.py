"""The state of a run that the live view draws, and how it changes by events and by the files of the run folder.

``after`` is pure: it returns a new state for a state, an event and the current time, which the caller passes in. A
``RunPicture`` holds the newest state, and also reads metrics and checkpoints from the run folder. A *beat* is what a
node reports each second: step and phase of each rank, and how busy the host is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.cluster.events import LogLine, NodeExit, NodeLost, NodeSilent
from pipeline.core import program as programs
from pipeline.core.specs import LaunchPlan, Wait
from pipeline.runs import checkpoints, metrics_file
from pipeline.runs.contents import what_runs
from pipeline.runs.metrics_file import MetricsRow
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, Phase, Usage, phase_words

LOSSES = ("train/loss", "loss", "val/loss")
_RATE_S = 5.0  # the shortest time over which a host's speed is measured
STEPS = re.compile(r"([\d,]+) steps? an epoch, ([\d,]+) steps?")  # a line of rank 0 (trainers/training/session.py)
_WARNING = re.compile(r"\bwarning: ", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"\S+:(?:-|\d+) \| ")  # host and rank in front of a rank's line


@dataclass(frozen=True, kw_only=True)
class Saved:
    """An event: a checkpoint of this step has come into the run folder."""

    step: int


@dataclass(frozen=True, kw_only=True)
class ShownLine:
    """An event: a line was written above the view, by the command itself or, with host and rank in front, by a rank."""

    text: str


@dataclass(frozen=True, kw_only=True)
class HostState:
    """One host of a run."""

    ranks: int
    step: int = 0  # the last step that all ranks of the host have begun; 0: none
    doing: str = "starting"  # what the rank does for which the others wait,
    for_s: float = 0.0  # and for how long
    steps_per_s: float | None = None  # None until two reports are far enough apart
    usage: Usage | None = None
    end: str = ""  # how the attempt ended there: ended, failed (1), lost; "": it runs
    speed_from: tuple[float, int] | None = None  # (time, step) from which the next speed is measured


LOST = "lost"  # a host that may come back


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run. Unknown steps and epochs are 0; times are in seconds of a monotonic clock."""

    key: str
    title: str
    first_doing: str = "starting"  # what each host does until its ranks report
    batch: int = 0
    epochs: int = 0  # of the whole run
    attempt: int = 0
    run_id: str = ""  # of the attempt
    world_size: int = 0
    hosts: Mapping[str, HostState] = field(default_factory=lambda: MappingProxyType({}))  # by label
    doing: Wait = field(default_factory=lambda: Wait(what="starting"))  # what the command waits for
    step: int = 0  # of the newest row of metrics
    epoch: int = 0
    steps: int = 0  # of the whole run
    steps_per_epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # the newest value of each
    images_per_s: float | None = None
    left_s: float | None = None  # estimated time to the last step, at the speed of this attempt,
    left_estimated_at: float = 0.0  # and when it was estimated
    saved_step: int = 0  # of the newest checkpoint; 0: none
    saved_at: float = 0.0
    warnings: int = 0
    warning: str = ""  # the newest one
    began: tuple[float, int] | None = None  # (unix seconds, step) of the first row of metrics of this attempt

    @property
    def done_fraction(self) -> float:
        """The finished part of the steps, from 0 to 1; 0 if unknown."""
        return min(1.0, self.current_step / self.steps) if self.steps else 0.0

    @property
    def current_step(self) -> int:
        """The number of finished steps. Hosts report each second, rank 0's metrics come less often."""
        begun = min((host.step for host in self.hosts.values() if not host.end), default=0)
        return max(self.step, begun - 1)

    @property
    def loss(self) -> float | None:
        """The newest loss; None before the first."""
        return next((self.metrics[name] for name in LOSSES if name in self.metrics), None)


def first_state(key: str, config: Mapping[str, Any]) -> RunState:
    """Return the state of a run before any event; ``config`` is the content of its config.json."""
    trainer = config.get("trainer")
    is_ours = programs.of(config).is_ours
    settings: Mapping[str, Any] = trainer if isinstance(trainer, Mapping) and is_ours else {}
    batch, epochs = settings.get("global_batch_size"), settings.get("epochs")
    return RunState(
        key=key,
        title=what_runs(config),
        first_doing="starting" if is_ours else "running",  # a script may never report what it does
        batch=batch if isinstance(batch, int) else 0,
        epochs=epochs if isinstance(epochs, int) else 0,
    )


def after(state: RunState, event: object, now: float) -> RunState:
    """Return the state after ``event``; most kinds change nothing. ``now`` in seconds of a monotonic clock."""
    match event:
        case NodeBeat():
            host = state.hosts.get(event.host) or HostState(ranks=len(event.ranks), doing=state.first_doing)
            if host.end not in ("", LOST):  # the beat was sent before the host's end and arrived after it
                return state
            return _with_host(state, event.host, _after_beat(host, event, now))
        case MetricsRow():
            return _after_metrics(state, event, now)
        case LogLine():
            return _after_line(state, event.text)
        case ShownLine():  # a rank's line also comes as a LogLine, and its warning must be counted once
            return state if _LOG_PREFIX.match(event.text) else _after_line(state, event.text)
        case Wait():
            return replace(state, doing=event)
        case Saved():
            return replace(state, saved_step=event.step, saved_at=now) if event.step != state.saved_step else state
        case LaunchPlan():
            hosts = {node.host: HostState(ranks=node.nproc_per_node, doing=state.first_doing) for node in event.nodes}
            return replace(
                state, attempt=event.attempt, run_id=event.run_id, world_size=event.world_size, hosts=hosts, began=None,
                left_s=None,
            )  # fmt: skip
        case NodeExit():
            return _with_end(state, event.host, "ended" if event.code == 0 else f"failed ({event.code})")
        case NodeLost() | NodeSilent():
            return _with_end(state, event.host, LOST)
        case _:
            return state


def _with_end(state: RunState, name: str, end: str) -> RunState:
    host = state.hosts.get(name) or HostState(ranks=0)
    return _with_host(state, name, replace(host, end=end))


def _with_host(state: RunState, name: str, host: HostState) -> RunState:
    return replace(state, hosts={**state.hosts, name: host})


def _after_beat(host: HostState, beat: NodeBeat, now: float) -> HostState:
    usage = beat.usage or host.usage
    if not beat.ranks:  # they haven't reported yet
        return replace(host, usage=usage, end="")
    # The others wait for the rank that is furthest behind. Of several, one that isn't waiting itself is the likely
    # cause, and the one that has been busy longest.
    slowest = min(beat.ranks, key=lambda rank: (rank.step, rank.phase == Phase.WAITING, -rank.for_s))
    step = min(rank.step for rank in beat.ranks)
    speed_from, steps_per_s = host.speed_from, host.steps_per_s
    if speed_from is None or step < speed_from[1]:  # the first beat, or the first of a new attempt
        speed_from, steps_per_s = (now, step), None
    elif now - speed_from[0] >= _RATE_S:
        speed_from, steps_per_s = (now, step), (step - speed_from[1]) / (now - speed_from[0])
    return replace(
        host, ranks=max(host.ranks, len(beat.ranks)), step=step, doing=phase_words(slowest.phase),
        for_s=slowest.for_s, steps_per_s=steps_per_s, usage=usage, end="",
        speed_from=speed_from,
    )  # fmt: skip


def _after_metrics(state: RunState, row: MetricsRow, now: float) -> RunState:
    metrics = {**state.metrics, **row.metrics}
    bad = [name for name, value in row.metrics.items() if not math.isfinite(value)]
    began, left_s = state.began, state.left_s
    # Rows of earlier attempts don't count: the time between two attempts would make the speed seem slower.
    if row.attempt == state.run_id and (began is None or began[1] > row.step):
        began = (row.time_s, row.step)
    if began is not None and state.steps and row.step > began[1]:
        left_s = (row.time_s - began[0]) / (row.step - began[1]) * (state.steps - row.step)
    speed = row.metrics.get("train/images_per_s", state.images_per_s)
    state = replace(
        state, step=row.step, epoch=row.epoch or 0, metrics=metrics, images_per_s=speed, began=began, left_s=left_s,
        left_estimated_at=now,
    )  # fmt: skip
    return _with_warning(state, f"{bad[0]} is {row.metrics[bad[0]]} at step {row.step}") if bad else state


def _after_line(state: RunState, text: str) -> RunState:
    if match := STEPS.search(text):
        per_epoch, total = (int(number.replace(",", "")) for number in match.groups())
        state = replace(state, steps_per_epoch=per_epoch, steps=total)
    if match := _WARNING.search(text):
        return _with_warning(state, text[match.end() :].partition("\n")[0])
    return state


def _with_warning(state: RunState, text: str) -> RunState:
    return replace(state, warnings=state.warnings + 1, warning=text)


# -------------------------------------------------------------- from events, and from files of the run folder
class GrowingFile:
    """Reads lines that are added to a file. If it is above ``most_bytes`` at first, reading begins near its end."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._at: int | None = None

    def new_lines(self) -> list[bytes]:
        """Return the lines since the last call; none if it can't be read. If it was cut, continue at its new end."""
        with suppress(OSError), self._path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - self._most_bytes) if self._most_bytes else 0
            is_mid_line = self._at is None and start > 0  # the first line is then dropped
            self._at = file.seek(start if self._at is None else min(self._at, size))
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # the rest is a line that is still being written
            self._at += len(complete)
            return complete.splitlines()[1 if is_mid_line else 0 :]
        return []


class FolderNews:
    """Reads what was added to a run folder: lines of metrics.jsonl, and checkpoints."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._metrics = run_dir, GrowingFile(run_dir / run_folder.METRICS)
        self._saved_step = 0

    def new_events(self) -> Iterator[MetricsRow | Saved]:
        """Yield an event for each row of metrics and each newest checkpoint since the last call."""
        yield from filter(None, map(metrics_file.parse, self._metrics.new_lines()))
        with suppress(OSError):
            newest_step = checkpoints.newest_step(self._run_dir)
            if newest_step != self._saved_step:
                self._saved_step = newest_step
                yield Saved(step=newest_step)


class RunPicture:
    """The content of a run's view (``screen.Picture``)."""

    def __init__(self, state: RunState, run_dir: Path) -> None:
        self.state = state
        self._news = FolderNews(run_dir)

    def apply(self, event: Any, now: float) -> None:
        self.state = after(self.state, event, now)

    def read_files(self, now: float) -> None:
        for event in self._news.new_events():
            self.apply(event, now)
