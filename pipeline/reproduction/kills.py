"""Kill a repetition of a run at moments drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.agent.running.processes import find_processes
from pipeline.core.specs import State
from pipeline.reproduction.checkpoint_contents import state_kinds
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_EARLIEST, _LATEST = 0.1, 0.95  # of the time from the first to the last row of metrics
_WRITTEN_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill.

    Attributes:
        after_s: seconds after its attempt began.
        checkpoint: path in the run folder of the newest one at that moment.
        holds: the kinds of state that this checkpoint names, see ``state_kinds``.
    """

    after_s: float
    checkpoint: str | None
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When to kill: ``first_row_s`` is how long an attempt takes until its first row of metrics.

    ``into_s`` are ascending seconds of training, counted from that row, over all attempts.
    """

    first_row_s: float
    into_s: tuple[float, ...]


def draw_moments(timed: RunFolder, kills: int, seed: int, *, sooner: float = 1.0) -> Moments:
    """Draw the moments of so many kills from a seed, within the training time of the finished run ``timed``.

    Args:
        sooner: factor of the drawn moments.
    """
    entries = journal.read(timed.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row.time_s for row in metrics_file.rows(timed.path / run_folder.METRICS) if row.time_s >= begun]
    first, last = (min(rows), max(rows)) if len(rows) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    shares = sorted(chance.uniform(_EARLIEST, _LATEST) for _ in range(kills))
    return Moments(first_row_s=first - begun, into_s=tuple(share * (last - first) * sooner for share in shares))


class Killer:
    """Kills the only run below ``runs_dir`` once in each attempt, further and further into the training.

    An attempt goes on where its checkpoint was saved; without a checkpoint it trains what the attempt before it did.

    Args:
        awaits_checkpoint: the last kill waits until there is a checkpoint.
    """

    def __init__(
        self, runs_dir: Path, moments: Moments, say: Callable[[str], None], *, awaits_checkpoint: bool
    ) -> None:
        self.kills: list[Kill] = []
        self._runs_dir, self._moments, self._say = runs_dir, moments, say
        self._remaining_s = [*moments.into_s]
        self._awaits_checkpoint = awaits_checkpoint
        self._killed_at = 0.0  # unix time of the last kill
        self._began_s = 0.0  # seconds of training before this attempt
        self._saved_at = 0.0  # unix time at which the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command_pid: int) -> None:
        """Once it is time, kill the ranks, or stop the command if they run on other computers."""
        if not self._remaining_s or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at = entries[-1].time
        trains_from = started_at + self._moments.first_row_s
        if time.time() < trains_from + max(0.0, self._remaining_s[0] - self._began_s):
            return
        if self._awaits_checkpoint and len(self._remaining_s) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command_pid, signal.SIGTERM)
        self._remaining_s.pop(0)
        self._began_s += saved_s(run_dir, trains_from)
        self.kills.append(_kill(run_dir, after_s))
        self._say(f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s")

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if there is a checkpoint that was seen half a second ago, so that it is completely written."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def look_again(self) -> None:
        """Add the newest checkpoint to the last kill, if other hosts have sent one only after it."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


def saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 without a later one."""
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
        return checkpoints.newest_of_script(run_dir, settings)
    return None
