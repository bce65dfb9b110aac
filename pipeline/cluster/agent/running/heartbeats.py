"""The heartbeats of this node's ranks. Those of a script are made of what the system shows, as it reports nothing.

A rank that waits in a gloo collective takes 0.2 % of a core and its main thread never wakes (measured: torch 2.15, two
ranks of which one is stopped), so low limits tell work from waiting.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import struct
import time
from typing import NamedTuple

from trainers.contract import run_folder
from trainers.contract.beats import CELLS, FILE, Phase, RankBeat

from ..node import RANK_OUTPUTS, read_text
from ..requests import NodeStart
from .processes import pids_of_tree, stat_fields

_CORES = 0.02  # processor time per second
_WAKES_PER_S = 30.0  # of the main thread: a download wakes for each packet, a wait only a few times a second
_stacks_at = [0.0]  # monotonic time when ranks last wrote their stacks, which is no work of their own


def note_stacks() -> None:
    """Note that ranks are writing their stacks."""
    _stacks_at[0] = time.monotonic()


def read_beats(node: NodeStart) -> list[tuple[str, RankBeat]]:
    """Return (folder of the rank's files, heartbeat) of each readable rank.

    ``FILE`` there is a link to a memory file of the rank, so it is gone with the rank's process.
    """
    beats = []
    ranks = os.path.join(glob.escape(node.state_dir), "ranks/*/attempt_*/*")
    for path in sorted(glob.glob(os.path.join(ranks, FILE))):
        with contextlib.suppress(OSError, struct.error, ValueError):
            with open(path, "rb") as file:
                pid, step, phase, moves, since_ns, collectives, own_ns, _ = CELLS.unpack(file.read(CELLS.size))
            folder = os.path.dirname(path)
            beat = RankBeat(
                rank=node.first_rank + int(os.path.basename(folder)),
                pid=pid,
                step=step,
                phase=phase,
                moves=moves,
                for_s=round((time.monotonic_ns() - since_ns) / 1e9, 3),
                collectives=collectives,
                own_s=round(own_ns / 1e9, 3),
            )
            beats.append((folder, beat))
    return beats


class RankBeats:
    """The heartbeats of a node's ranks. For a script, ``moves`` counts the calls of ``read`` that found new work of it.

    Work is processor time, bytes read or written and pages read from a disk, by the rank and its children; wake-ups of
    its main thread; a printed line or a metric, which count for all ranks.
    """

    def __init__(self, node: NodeStart) -> None:
        self._node = node
        self._works: dict[int, tuple[float, dict[int, _Work]]] = {}  # rank's pid → when, and work of each process
        self._moves: dict[int, tuple[int, float]] = {}  # rank's pid → number of moves, and when the last one was
        self._sizes: dict[str, int] = {}  # of files that grow when a rank prints

    def read(self) -> list[RankBeat]:
        """Return each readable rank's heartbeat."""
        beats = [beat for _, beat in read_beats(self._node)]
        wrote = any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in beats) and self._wrote()
        return [self._script_beat(beat, wrote) if beat.phase == Phase.RUNNING_A_SCRIPT else beat for beat in beats]

    def _script_beat(self, beat: RankBeat, wrote: bool) -> RankBeat:
        pid, now = beat.pid, time.monotonic()
        at, before = self._works.get(pid, (now, {}))
        works = {member: _work_of(member, is_rank=member == pid) for member in pids_of_tree(pid)}
        moved = wrote or not before or (_has_worked(before, works, now - at) and _stacks_at[0] < at)
        moves, since = self._moves.get(pid, (0, now))
        self._works[pid] = now, works
        moves, since = self._moves[pid] = (moves + 1, now) if moved else (moves, since)
        return beat._replace(moves=moves, for_s=round(now - since, 3))

    def _wrote(self) -> bool:
        """Whether a rank printed or logged a metric since the last call; checkpoints count as written bytes.

        The node's log isn't looked at, because the agent's own lines (of a stopped process) are in it, too.
        """
        state = self._node.state_dir
        paths = glob.glob(os.path.join(glob.escape(state), RANK_OUTPUTS))
        paths += [os.path.join(state, "torchrun.log"), os.path.join(self._node.run_dir, run_folder.METRICS)]
        before, self._sizes = self._sizes, {path: _size(path) for path in paths}
        return self._sizes != before


class _Work(NamedTuple):
    """The work of one process so far."""

    cpu_s: float = 0.0
    bytes: int = 0  # read and written, and pages read from a disk
    wakes: int = 0  # of the main thread of a rank
    is_ready: bool = False  # it has a core, or waits for one


def _has_worked(before: dict[int, _Work], now: dict[int, _Work], passed_s: float) -> bool:
    """Whether the processes of a rank have worked between two calls."""
    pairs = [(before.get(pid, _Work()), work) for pid, work in now.items()]
    cpu_s = sum(work.cpu_s - old.cpu_s for old, work in pairs)
    wakes = sum(work.wakes - old.wakes for old, work in pairs)
    return (
        any(work.is_ready or work.bytes != old.bytes for old, work in pairs)
        or cpu_s >= _CORES * passed_s
        or wakes >= _WAKES_PER_S * passed_s
    )


def _work_of(pid: int, *, is_rank: bool) -> _Work:
    """Return the work of one process. ``is_rank``: its wake-ups count."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = stat_fields(pid)
        ticks = sum(map(int, fields[11:15]))  # its own and those of children that have ended
        amount = int(fields[9]) + sum(_numbers_in(f"/proc/{pid}/io", "rchar", "wchar"))  # fields[9]: major faults
        wakes = sum(_numbers_in(f"/proc/{pid}/status", "voluntary_ctxt_switches")) if is_rank else 0
        return _Work(ticks / os.sysconf("SC_CLK_TCK"), amount, wakes, is_ready=fields[0] == "R")
    return _Work()


def _numbers_in(path: str, *names: str) -> list[int]:
    return [
        int(number) for name, number in re.findall(r"^(\w+):\s*(\d+)$", read_text(path), re.MULTILINE) if name in names
    ]


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return -1
