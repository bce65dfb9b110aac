"""Processes of a run that somebody has stopped (SIGSTOP): the run waits for them, and none of it can say why."""

# Much of this is /proc: os.path all the way.
# ruff: noqa: PTH123
from __future__ import annotations

import contextlib
import time

LOOK_S = 1.0
STOPPED_S = 3.0  # until it is said: who paces a process stops it for moments


class Stops:
    """Looks at torchrun and all that it has started; ``root`` is its process id."""

    def __init__(self, root: int | None = None) -> None:
        self.root = root
        self.looked = time.monotonic()
        self.since: dict[int, float] = {}  # process id → when it was first seen stopped
        self.said: set[int] = set()

    def news(self) -> list[str]:
        """Lines for the log of the node, one for each process that has stood still for a while."""
        now = time.monotonic()
        if self.root is None or now - self.looked < LOOK_S:
            return []
        self.looked = now
        stopped = [pid for pid in family(self.root) if state(pid) == "T"]
        self.since = {pid: self.since.get(pid, now) for pid in stopped}
        self.said.intersection_update(stopped)
        new = [pid for pid in stopped if pid not in self.said and now - self.since[pid] >= STOPPED_S]
        self.said.update(new)
        return [
            f"paceline: WARNING: process {pid} is stopped (SIGSTOP), and the run waits for it; "
            f"kill -CONT {pid} lets it go on"
            for pid in new
        ]


def family(root: int) -> list[int]:
    """``root`` and what its main thread, and theirs, have started; no more than that where the system doesn't tell."""
    found = [root]
    for pid in found:
        found += children(pid)
    return found


def children(pid: int) -> set[int]:
    """What the main thread of a process has started and still runs; nothing where the system doesn't tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return set(map(int, file.read().split()))
    return set()


def state(pid: int) -> str:
    """The system's letter for it; '' where there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""
