"""Whether the ranks of a script do anything, as the system sees it: nobody edited the script to say so.

A rank that waits in a gloo collective takes 0.2 % of a core and its main thread never wakes (measured: torch 2.15,
two ranks of which one is stopped), so little is enough to tell work from waiting.
"""

# Requests carry paths as text, and much of this is /proc: os.path all the way.
# ruff: noqa: PTH116, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import os
import time

from trainers.contract import run_folder
from trainers.contract.beats import Phase, RankBeat

from .beats import read_beats
from .look import looked_since
from .wire import Json

_CORES = 0.02  # of processor time in a second
_WAKES_PER_S = 30.0  # of the main thread: a download wakes for each packet, a wait that looks each second doesn't
_LARGEST_TREE = 256


class Beats:
    """The beats of a node's ranks; of a script's, ``moves`` counts the looks at which anything of it had moved.

    That is: processor time, bytes read or written and pages read from a disk, of the rank and of what it has started;
    wake-ups of its main thread; a line in the node's log or a metric, which count for all its ranks.
    """

    def __init__(self, node: Json) -> None:
        self._node = node
        self._known: dict[int, tuple[float, dict[int, _Work]]] = {}
        self._moves: dict[int, tuple[int, float]] = {}
        self._files: list[int] = []

    def read(self) -> list[RankBeat]:
        """The beat of each rank that can be read."""
        beats = [beat for _, beat in read_beats(self._node)]
        wrote = any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in beats) and self._wrote()
        return [self._of_script(beat, wrote) if beat.phase == Phase.RUNNING_A_SCRIPT else beat for beat in beats]

    def _of_script(self, beat: RankBeat, wrote: bool) -> RankBeat:
        pid, now = beat.pid, time.monotonic()
        at, before = self._known.get(pid, (now, {}))
        works = {one: _work(one, main=one == pid) for one in _tree(pid)}
        moved = wrote or not before or (_moved(before, works, now - at) and not looked_since(at))
        moves, since = self._moves.get(pid, (0, now))
        self._known[pid] = now, works
        moves, since = self._moves[pid] = (moves + 1, now) if moved else (moves, since)
        return beat._replace(moves=moves, for_s=round(now - since, 3))

    def _wrote(self) -> bool:
        """Whether a line or a metric came since the last look. (A checkpoint is bytes that its rank has written.)"""
        paths = (self._node["state_dir"], "log"), (self._node["run_dir"], run_folder.METRICS)
        before, self._files = self._files, [_size(os.path.join(*path)) for path in paths]
        return self._files != before


class _Work:
    """What one process has done so far. ``ready``: it waits for a core, or has one."""

    __slots__ = ("bytes", "cpu_s", "ready", "wakes")

    def __init__(self, cpu_s: float, amount: int, wakes: int, *, ready: bool) -> None:
        self.cpu_s, self.bytes, self.wakes, self.ready = cpu_s, amount, wakes, ready


_NONE = _Work(0.0, 0, 0, ready=False)


def _moved(before: dict[int, _Work], now: dict[int, _Work], passed_s: float) -> bool:
    """Whether the processes of a rank have worked between two looks."""
    pairs = [(before.get(pid, _NONE), work) for pid, work in now.items()]
    cpu_s = sum(work.cpu_s - old.cpu_s for old, work in pairs)
    wakes = sum(work.wakes - old.wakes for old, work in pairs)
    return (
        any(work.ready or work.bytes != old.bytes for old, work in pairs)
        or cpu_s >= _CORES * passed_s
        or wakes >= _WAKES_PER_S * passed_s
    )


def _tree(pid: int) -> list[int]:
    """A process and those that it has started (its own alone where the kernel doesn't list children)."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="ascii") as file:
                    found += map(int, file.read().split())
        if len(found) > _LARGEST_TREE:
            break
    return found


def _work(pid: int, *, main: bool) -> _Work:
    """``main``: it is the rank itself, whose wake-ups count."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))  # its own and those of children that have ended
        amount = int(fields[9]) + sum(_numbers(f"/proc/{pid}/io", "rchar", "wchar"))  # fields[9]: major faults
        wakes = sum(_numbers(f"/proc/{pid}/status", "voluntary_ctxt_switches")) if main else 0
        return _Work(ticks / os.sysconf("SC_CLK_TCK"), amount, wakes, ready=fields[0] == "R")
    return _NONE


def _numbers(path: str, *names: str) -> list[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.split(":") for line in file]
        return [int(row[1]) for row in rows if row[0] in names]
    return []


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return -1
