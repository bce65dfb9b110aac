"""The training losses since they were last read, kept on the device so that no step waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The losses of one interval: ``loss`` is the mean over ``steps`` steps and all ranks (NaN: none was finite).

    ``called`` and ``stop`` are rank 0's requests for a checkpoint and for the end of the run.
    """

    loss: float
    steps: int
    called: bool
    stop: bool


class Losses:
    """The training losses since the last read, one row per part of the global batch, kept on the device.

    ``add`` costs one small copy on the device; only ``read`` waits for it.
    """

    def __init__(self, context: RankContext, capacity: int, parts_per_rank: int = 1) -> None:
        self._context = context
        first, self._whose = context.ranks.rank * parts_per_rank, "on rank" if parts_per_rank == 1 else "in part"
        self._own = slice(first, first + parts_per_rank)
        rows = context.ranks.world_size * parts_per_rank
        self._values = torch.zeros(rows, capacity + 1, device=context.device)  # last column: rank 0's request
        self._count = 0
        self._restored = 0  # how many of these losses were computed by an earlier attempt

    def add(self, loss: Tensor) -> None:
        """Keep the mean losses of this rank's parts of the batch: a scalar, or [parts]."""
        self._values[self._own, self._count].copy_(loss.detach())
        self._count += 1

    def unread(self, last_step: int, *, saved_step: int, skip_nonfinite: bool) -> list[list[float]]:
        """Take out the losses that were not read yet, a row for each part, for ``restore``. Raises as ``read`` does."""
        rows, _ = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        return rows

    def restore(self, count: int, rows: Sequence[Sequence[float]] = ()) -> None:
        """Put back ``unread`` losses. Every rank passes ``count``, the length of a row; one rank passes the rows."""
        self._count = self._restored = count
        for part, row in enumerate(rows):
            self._values[part, :count] = torch.tensor(row, device=self._values.device)

    def call(self, *, stop: bool = False) -> None:
        """Let rank 0 request a checkpoint at the next read (with ``stop``, the end of the run too).

        The request travels in the table of losses, so it needs no message of its own.
        """
        self._values[0, -1].clamp_(min=2.0 if stop else 1.0)

    def read(self, last_step: int, *, saved_step: int = 0, skip_nonfinite: bool = False) -> Reading:
        """Return the mean loss since the last read, over all ranks. The result is the same on each rank.

        Raises:
            TrainerError: a loss is not a number or infinite, naming step, rank or part, and last checkpoint.
        """
        steps = self._count - self._restored
        rows, call = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        finite = [loss for row in rows for loss in row if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        return Reading(loss=mean, steps=steps, called=call > 0, stop=call > 1)

    def _rows(self) -> tuple[list[list[float]], float]:
        """Return the losses of each part and rank 0's request, and clear both."""
        count, self._count, self._restored = self._count, 0, 0
        table: list[list[float]] = self._context.read(self._context.sum(self._values))
        self._values.zero_()
        return [row[:count] for row in table], table[0][-1]

    def _refuse_nonfinite(self, rows: Sequence[Sequence[float]], last_step: int, saved_step: int) -> None:
        count = len(rows[0])
        for column in range(count):
            bad = [number for number, row in enumerate(rows) if not math.isfinite(row[column])]
            if bad:
                where = f"at step {last_step - count + 1 + column} {self._whose} {', '.join(map(str, bad))}"
                last_good = f"the last good checkpoint is that of step {saved_step}"
                last_good = last_good if saved_step else "there is no checkpoint yet"
                raise TrainerError(
                    f"the training loss is {rows[bad[0]][column]} {where}; {last_good}; a lower optimizer.lr or "
                    "trainer.precision=fp32 usually helps, trainer.skip_nonfinite=true leaves such steps out"
                )
