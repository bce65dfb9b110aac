"""Ranks that ended while their run was not over, perhaps with exit code 0: torchrun takes that for success, and waits.

The entry of a rank makes ``running-PID`` beside its error file and removes it at a good end. A rank whose process is
gone and whose file is there has ended by itself, unless torchrun or the agent told it to. Of several that end at once
torchrun tells the first one's exit code while it ends the others, and all of them in the table of its last words.
"""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH118, PTH207
from __future__ import annotations

import glob
import os
import re

from trainers.contract.beats import RUNNING

from .processes import start_time

_TOLD = re.compile(r"Sending process (\d+) closing signal")  # torchrun does this after another rank's failure
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")


class EarlyExits:
    """What is known of the ranks of one node, whose state folder is ``state``."""

    def __init__(self, state: str) -> None:
        self._pattern = os.path.join(glob.escape(state), f"ranks/*/attempt_*/*/{RUNNING}*")
        self._told: set[int] = set()
        self._codes: dict[int, int] = {}
        self._begun: set[int] | None = None  # once the end of all has come: the ranks that had begun by then

    def read(self, line: str) -> None:
        """A line of torchrun's."""
        found, code = _TOLD.search(line), _CODE.match(line)
        if found:
            self._told.add(int(found[1]))
        if code:
            self._codes[int(code[2])] = int(code[1])

    @property
    def torchrun_ends_others(self) -> bool:
        """Whether it has seen a failure, and will tell of it when the other ranks are gone."""
        return bool(self._told)

    def about_to_end_all(self) -> None:
        """Whoever is alive now is told to end by the agent."""
        if self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
        self._told |= {pid for _, pid in self._unfinished() if start_time(pid) is not None}

    def torchrun_ended(self, code: int) -> None:
        """Where a signal of somebody else's ended torchrun, the same may have ended ranks, and nobody knows."""
        if code < 0 and self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
            self._told |= self._begun

    def ranks(self) -> dict[int, int]:
        """Local ranks that have ended by themselves, with their exit codes; 0 also where torchrun has told of none."""
        found = [(rank, pid) for rank, pid in self._unfinished() if self._begun is None or pid in self._begun]
        ended = ((rank, pid) for rank, pid in found if pid not in self._told and start_time(pid) is None)
        return {rank: self._codes.get(pid, 0) for rank, pid in ended}

    def _unfinished(self) -> list[tuple[int, int]]:
        """(local rank, process id) of each rank that has not come to a good end."""
        places = (path.rsplit("/", 2) for path in glob.glob(self._pattern))
        return [(int(rank), int(name.removeprefix(RUNNING))) for _, rank, name in places]
