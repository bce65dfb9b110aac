"""Kill a repetition of a run at moments drawn from a seed. How far it is shows in log lines and metrics that name epoch
or step, as a busy computer trains more slowly than when the run was made; without any, time decides.
"""

from __future__ import annotations

import os
import random
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.agent.running.processes import find_processes
from pipeline.core.specs import State
from pipeline.reproduction.culprits import Kill, state_kinds
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from pipeline.runs.script_attempts import ScriptAttempts
from trainers.contract import run_folder
from trainers.script.metrics.printed import parse_line, text_of_rank_0

_EARLIEST, _LATEST = 0.1, 0.95  # of the training
_FEWEST_POSITIONS = 3
_WRITTEN_S = 0.5
_LAST_ROWS_BYTES = 1 << 14

_Position = tuple[float, int]
"""Epoch and step of a line with metrics."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When to kill, and how the finished run went.

    Attributes:
        shares: of the training over all attempts at which to kill, ascending.
        positions: of the finished run, ascending; () if they can't be seen while it runs.
        are_rows: the positions are those of rows in metrics.jsonl, not of printed lines.
        first_row_s: from the begin of an attempt to its first row of metrics.
        trained_s: from the first row to the last one.
    """

    shares: tuple[float, ...]
    positions: tuple[_Position, ...] = ()
    are_rows: bool = False
    first_row_s: float
    trained_s: float


def draw_moments(timed: RunFolder, kills: int, seed: int, *, sooner: float = 1.0) -> Moments:
    """Draw the moments of ``kills`` kills from a seed, within the training of the finished run ``timed``.

    ``sooner``: a factor of the drawn shares.
    """
    entries = journal.read(timed.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row for row in metrics_file.rows(timed.path / run_folder.METRICS) if row.time_s >= begun]
    times = [row.time_s for row in rows]
    first, last = (min(times), max(times)) if len(times) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    # one kill in each of ``kills`` equal parts: a state that changes late shows only after a late kill
    between = (_LATEST - _EARLIEST) / max(1, kills)
    shares = [(_EARLIEST + (number + chance.random()) * between) * sooner for number in range(kills)]
    logs = (timed.path / run_folder.ATTEMPTS).glob("*/*.log")
    printed = [position for log in logs for position in _printed_in(log)]
    # printed metrics reach metrics.jsonl only at the end of an attempt
    positions = {(0.0, row.step) for row in rows} if not printed else {one for one in printed if one is not None}
    return Moments(
        shares=tuple(shares),
        positions=tuple(sorted(positions)) if len(positions) >= _FEWEST_POSITIONS else (),
        are_rows=not printed,
        first_row_s=first - begun,
        trained_s=last - first,
    )


class Killer:
    """Kills the only run below ``runs_dir`` once in each attempt, later and later in the training.

    ``awaits_checkpoint``: the last kill waits until there is a checkpoint.
    """

    def __init__(
        self, runs_dir: Path, moments: Moments, say: Callable[[str], None], *, awaits_checkpoint: bool
    ) -> None:
        self.kills: list[Kill] = []
        self._runs_dir, self._moments, self._say = runs_dir, moments, say
        self._remaining = [*moments.shares]
        self._awaits_checkpoint = awaits_checkpoint
        self._progress = _Progress(moments, 0)
        self._killed_at = 0.0  # unix time of the last kill
        self._began_s = 0.0  # seconds of training that this attempt needs not repeat, by earlier checkpoints
        self._saved_at = 0.0  # unix time at which the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command_pid: int) -> None:
        """Kill the ranks once it is time; if they run on other computers, stop the command."""
        if not self._remaining or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at, attempt = entries[-1].time, entries[-1].attempt
        trains_from = started_at + self._moments.first_row_s
        if self._share(run_dir, attempt, trains_from) < self._remaining[0]:
            return
        if self._awaits_checkpoint and len(self._remaining) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command_pid, signal.SIGTERM)
        self._remaining.pop(0)
        self._began_s += saved_s(run_dir, trains_from)
        self.kills.append(_kill(run_dir, after_s))
        how = f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s"
        self._say(f"{how}; an ERROR below this line is the kill's")

    def _share(self, run_dir: Path, attempt: int, trains_from: float) -> float:
        """Return the share of the training that is done."""
        if self._moments.positions:
            if self._progress.attempt != attempt:
                self._progress = _Progress(self._moments, attempt)
            return self._progress.share(run_dir)
        since = time.time() - trains_from
        return (self._began_s + since) / max(self._moments.trained_s, 1e-3) if since >= 0.0 else 0.0

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if a checkpoint has been there for half a second, after which it is written completely."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def look_again(self) -> None:
        """Add the newest checkpoint to the last kill, if another host has sent one only after it."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


class _Progress:
    """Follows how far an attempt is, by the positions that it shows."""

    def __init__(self, moments: Moments, attempt: int) -> None:
        self.attempt = attempt
        self._moments = moments
        self._read_bytes: dict[Path, int] = {}
        self._passed = 0  # of the finished run's positions
        self._since = 0.0  # monotonic time at which the last one was seen
        self._between_s = moments.trained_s / max(1, len(moments.positions) - 1)  # from one position to the next

    def share(self, run_dir: Path) -> float:
        """Return the share of the training that is done, between two positions by time."""
        seen = self._steps(run_dir) if self._moments.are_rows else self._printed(run_dir)
        passed = max((bisect_right(self._moments.positions, one) for one in seen), default=0)
        now = time.monotonic()
        if passed > self._passed:
            if self._passed:
                self._between_s = (now - self._since) / (passed - self._passed)
            self._passed, self._since = passed, now
        if not self._passed:
            return 0.0
        behind = min(1.0, (now - self._since) / self._between_s) if self._between_s > 0.0 else 1.0
        return (self._passed + behind) / len(self._moments.positions)

    def _printed(self, run_dir: Path) -> Iterator[_Position]:
        """Yield the positions in lines of the logs that are new since the last call."""
        for log in (run_dir / run_folder.ATTEMPTS / str(self.attempt)).glob("*.log"):
            with suppress(OSError), log.open("rb") as file:
                file.seek(self._read_bytes.get(log, 0))
                whole, end, _ = file.read().rpartition(b"\n")
                self._read_bytes[log] = self._read_bytes.get(log, 0) + len(whole) + len(end)
                yield from (one for one in _printed_positions(whole.split(b"\n")) if one is not None)

    def _steps(self, run_dir: Path) -> Iterator[_Position]:
        """Yield the steps of the last rows that this attempt wrote."""
        with suppress(OSError):
            rows = metrics_file.rows(run_dir / run_folder.METRICS, tail_bytes=_LAST_ROWS_BYTES)
            yield from ((0.0, row.step) for row in rows if row.attempt_number == self.attempt)


def _printed_in(log: Path) -> Iterator[_Position | None]:
    """Yield ``_printed_positions`` of a whole log. Raises OSError."""
    with log.open("rb") as file:
        yield from _printed_positions(line.rstrip(b"\n") for line in file)


def _printed_positions(lines: Iterable[bytes]) -> Iterator[_Position | None]:
    """Yield the position of each line of rank 0 with metrics; None for one that names no epoch and no step."""
    for line in lines:
        parsed = parse_line(text_of_rank_0(line.decode(errors="replace")))
        if parsed.metrics:
            yield parsed.position


def saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 if none was saved later."""
    newest = newest_checkpoint(run_dir)
    with suppress(OSError):  # removed meanwhile
        return max(0.0, newest.stat().st_mtime - since) if newest is not None else 0.0
    return 0.0


def _kill(run_dir: Path, after_s: float) -> Kill:
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return Kill(after_s=after_s, checkpoint=None)
    return Kill(after_s=after_s, checkpoint=str(newest.relative_to(run_dir)), holds=state_kinds(newest))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run in its folder, or None."""
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return ScriptAttempts(run_dir, settings).newest_checkpoint()
    return None
