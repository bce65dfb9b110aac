"""Where this rank stands, in memory that the node agent reads: its step, what it is at, since when.

Eight numbers in a memfd, which the agent opens through /proc: a store into memory is all that a step pays, no disk
can hold it up, and nothing is left behind. At STACKS_SIGNAL all threads' stacks are written to a file for the agent.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.contract.beats import (
    CELLS,
    COLLECTIVES,
    FILE,
    MOVES,
    OWN_NS,
    PHASE,
    PID,
    SINCE_NS,
    STACKS,
    STACKS_SIGNAL,
    STEP,
    Phase,
)

if TYPE_CHECKING:  # a rank that hangs while it imports torch is to be seen as well
    from torch import Tensor, nn

_OWN = (Phase.LOADING, Phase.COMPUTING)  # a rank's own work on its steps; what rank 0 writes between them isn't


class Heartbeat:
    """The numbers of this process. ``publish`` lets the agent see them; without it they are seen by nobody."""

    def __init__(self) -> None:
        self._cells = memoryview(bytearray(CELLS.size)).cast("q")

    def publish(self, folder: Path) -> None:
        """Put the way to the numbers into ``folder``. Where that can't be had the training goes on unwatched."""
        path = folder / FILE
        with suppress(OSError, ValueError):
            if sys.platform == "linux":
                descriptor = os.memfd_create("paceline-beat")
                path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            else:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.write(descriptor, bytes(CELLS.size))  # so the memory is there: a full disk is told of now
            cells = memoryview(mmap.mmap(descriptor, CELLS.size)).cast("q")
            cells[:] = self._cells
            cells[PID], cells[SINCE_NS] = os.getpid(), time.monotonic_ns()
            self._cells = cells
            stacks = os.open(folder / STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)

    def enter(self, phase: Phase) -> None:
        """This rank is at ``phase`` from now on (or still: that it moves is seen as well)."""
        cells, now = self._cells, time.monotonic_ns()
        if cells[PHASE] in _OWN and cells[STEP]:
            cells[OWN_NS] += now - cells[SINCE_NS]
        cells[PHASE], cells[SINCE_NS] = phase, now
        cells[MOVES] += 1

    def begin_step(self, step: int) -> None:
        """``step`` counts from 1."""
        self.enter(Phase.LOADING)
        self._cells[STEP] = step

    def wait(self) -> None:
        """From now on this rank waits for the others in the next collective."""
        self.enter(Phase.WAITING)
        self._cells[COLLECTIVES] += 1

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective in the midst of something else."""
        before = Phase(self._cells[PHASE])
        self.wait()
        yield
        self.enter(before)

    def watch_gradients(self, model: nn.Module) -> None:
        """Let a rank wait from the moment its last gradient is there, which is that of the first weight.

        For a device that computes before it returns: a backward pass on it holds the time of the others as well.
        """

        def arrived(_: Tensor) -> None:
            self.wait()

        first = next((item for item in model.parameters() if item.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


HEARTBEAT = Heartbeat()
"""That of this process, which is one rank."""
