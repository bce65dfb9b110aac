"""How long nothing has been heard."""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH116
from __future__ import annotations

import contextlib
import os
import time

LOOK_S = 1.5  # of one look at a silent file to the next: what is beyond, this process was stopped itself


class Silence:
    """For how many seconds a file has not changed, as this process saw it.

    Neither the system's clock (which may be set) nor a time stamp of the file's counts, only changes; and no time in
    which this process, its machine or its container was stopped: nobody could have been heard then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds = 0.0
        self.looked = time.monotonic()
        self.seen = self.state()

    def state(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            return found.st_mtime_ns, found.st_ino
        return None

    def look(self) -> float:
        now, seen = time.monotonic(), self.state()
        changed = seen is not None and seen != self.seen
        self.seconds = 0.0 if changed else self.seconds + min(now - self.looked, LOOK_S)
        self.looked, self.seen = now, seen or self.seen
        return self.seconds
