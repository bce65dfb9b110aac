"""The heartbeat of this rank: numbers (phase, step, …) that the node agent reads, to notice a rank that hangs.

They lie in a memfd, which the agent opens through /proc, so a step costs only a few stores into memory. When the agent
sends STACKS_SIGNAL, the stacks of all threads are written to a file."""

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

if TYPE_CHECKING:  # the heartbeat starts before torch is imported, to show a rank that hangs in that import
    from torch import Tensor, nn

_OWN = (Phase.LOADING, Phase.COMPUTING)  # a rank's own work on its steps, without rank 0's writing of files


class Heartbeat:
    """The numbers of this process. The agent sees them only after ``publish``."""

    def __init__(self) -> None:
        self._cells = memoryview(bytearray(CELLS.size)).cast("q")

    def publish(self, folder: Path) -> None:
        """Link the numbers into ``folder``. If that fails, the training continues without a heartbeat."""
        path = folder / FILE
        with suppress(OSError, ValueError):
            if sys.platform == "linux":
                descriptor = os.memfd_create("paceline-beat")
                path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            else:  # macOS has no memfd: an ordinary file
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.write(descriptor, bytes(CELLS.size))  # allocate the memory: a full disk must fail here
            cells = memoryview(mmap.mmap(descriptor, CELLS.size)).cast("q")
            cells[:] = self._cells
            cells[PID], cells[SINCE_NS] = os.getpid(), time.monotonic_ns()
            self._cells = cells
            stacks = os.open(folder / STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)

    def enter(self, phase: Phase) -> None:
        """Set the phase. Entering the same phase again counts as progress, too."""
        cells, now = self._cells, time.monotonic_ns()
        # sum up the time of a rank's own work: the agent compares it between ranks, to find a slow one
        if cells[PHASE] in _OWN and cells[STEP]:
            cells[OWN_NS] += now - cells[SINCE_NS]
        cells[PHASE], cells[SINCE_NS] = phase, now
        cells[MOVES] += 1

    def begin_step(self, step: int) -> None:
        """Note that ``step`` (from 1) begins."""
        self.enter(Phase.LOADING)
        self._cells[STEP] = step

    def wait(self) -> None:
        """Note that this rank waits in a collective."""
        self.enter(Phase.WAITING)
        self._cells[COLLECTIVES] += 1

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Return a context for a collective inside another phase, which is restored afterwards."""
        before = Phase(self._cells[PHASE])
        self.wait()
        yield
        self.enter(before)

    def watch_gradients(self, model: nn.Module) -> None:
        """On a CPU, begin the phase "waiting" when the gradient of the network's first weight is computed. It is the
        last gradient of a backward pass, so only the pass's collectives are left then.
        """

        def arrived(_: Tensor) -> None:
            self.wait()

        first = next((item for item in model.parameters() if item.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


HEARTBEAT = Heartbeat()
"""The heartbeat of this process."""
