"""Kill a repetition of a run at moments drawn from a seed, each in a new attempt."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.agent.running.processes import find_processes
from pipeline.core.specs import State
from pipeline.reproduction.checkpoint_names import state_kinds
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_EARLIEST, _LATEST = 0.1, 0.95  # of the time from the first to the last row of metrics
_WRITTEN_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, ``after_s`` seconds after its attempt began.

    ``checkpoint`` (in the run folder) was the newest, and ``holds`` are the kinds of state that it names.
    """

    after_s: float
    checkpoint: str | None
    holds: frozenset[str] = frozenset()


def moments(folder: RunFolder, kills: int, seed: int) -> tuple[float, list[float]]:
    """Return how long an attempt takes until its first row of metrics, and how far into the training to kill (s)."""
    entries = journal.read(folder.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row.time_s for row in metrics_file.rows(folder.path / run_folder.METRICS) if row.time_s >= begun]
    first, last = (min(rows), max(rows)) if len(rows) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    return first - begun, [
        at * (last - first) for at in sorted(chance.uniform(_EARLIEST, _LATEST) for _ in range(kills))
    ]


class Killing:
    """The kills of one proof, each in a new attempt and further into the training.

    An attempt begins where its checkpoint was saved, and without one where the attempt before began.

    Args:
        first_s: how long an attempt takes until its first row of metrics.
        into_s: how far into the training to kill, ascending.
        awaits_checkpoint: the last kill waits until there is a checkpoint.
    """

    def __init__(
        self,
        runs_dir: Path,
        first_s: float,
        into_s: Sequence[float],
        say: Callable[[str], None],
        *,
        awaits_checkpoint: bool,
    ) -> None:
        self.kills: list[Kill] = []
        self._runs_dir, self._first_s, self._say = runs_dir, first_s, say
        self._left_s = [*into_s]
        self._awaits_checkpoint = awaits_checkpoint
        self._killed_at = 0.0  # unix time of the last kill
        self._began_s = 0.0  # how far into the training this attempt began
        self._saved_at = 0.0  # unix time when the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command: int) -> None:
        """Kill the ranks, or stop the command (its process id) where they run on other computers, once it is time."""
        if not self._left_s or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at = entries[-1].time
        trains_from = started_at + self._first_s
        if time.time() < trains_from + max(0.0, self._left_s[0] - self._began_s):
            return
        if self._awaits_checkpoint and len(self._left_s) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command, signal.SIGTERM)
        self._left_s.pop(0)
        self._began_s += _saved_s(run_dir, trains_from)
        self.kills.append(_kill(run_dir, after_s))
        self._say(f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s")

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if there is a checkpoint, and was one half a second ago: the first isn't still being written."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def look_again(self) -> None:
        """Note the newest checkpoint, which other hosts may have sent only now."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


def _saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 without one."""
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
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return checkpoints.newest_of_script(run_dir, settings)
    return None
