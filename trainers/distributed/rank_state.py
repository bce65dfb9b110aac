"""State that differs between ranks: the batch statistics of batch normalisation. They are averaged over the ranks
before each evaluation; until then, each rank has its own.

With trainer.shards=N, each global batch is divided into N *parts*, and a rank computes N ÷ world_size neighbouring
parts. Then every part has batch statistics of its own, so that they don't depend on the number of ranks.

A checkpoint keeps a row of statistics for every rank (with trainer.shards, for every part), so that a resumed run has
the same ones. The functions below turn statistics into rows and back, and rows into those of another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainers.distributed.process_group import RankContext


def pairwise_sum(rows: Tensor) -> Tensor:
    """Sum [n, …] → […] in the order of a balanced binary tree, for n a power of two; overwrites ``rows``.

    With a row g0 … g7 for each of 8 parts: ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)). The 1, 2, 4 or 8
    neighbouring parts of a rank are exactly one pair of brackets, a *branch* of the tree. So each rank can sum its own
    branch, and the ranks' sums are added in the same tree. Floating-point addition is not associative, but as the tree
    is the same, so are the bits, on any number of ranks.
    """
    while len(rows) > 1:
        pairs = rows.view(len(rows) // 2, 2, *rows.shape[1:])
        rows = pairs[:, 0].add_(pairs[:, 1])
    return rows[0]


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers, in the model's order."""
    return [item for item in model.buffers() if item.is_floating_point()]


class PartBuffers:
    """A copy of a model's buffers for each part of this rank, if it has several. The model itself has one set of
    buffers, into which those of the part that is being computed are copied.
    """

    def __init__(self, model: nn.Module, parts: int) -> None:
        self._model = model
        self._current = list(model.buffers())
        self._copies = [[item.clone() for item in self._current] for _ in range(parts)] if parts > 1 else []

    @torch.no_grad()
    def reset(self) -> None:
        """Set the copy of each part to the model's buffers."""
        for copies in self._copies:
            _copy(copies, self._current)

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Return a context in which the model holds the buffers of the rank's part ``number`` (from 0)."""
        if not self._copies:
            yield
            return
        with torch.no_grad():
            _copy(self._current, self._copies[number])
        yield
        with torch.no_grad():
            _copy(self._copies[number], self._current)

    def statistics(self) -> list[Tensor]:
        """Return the floating-point buffers of all parts of this rank, part by part in the model's order."""
        if not self._copies:
            return statistics(self._model)
        return [item for copies in self._copies for item in copies if item.is_floating_point()]

    @torch.no_grad()
    def average(self, context: RankContext) -> None:
        """Set every part of every rank to the mean over all parts, summed pairwise in the order of the parts.

        Only called with trainer.shards. The settings refuse shards that are no power of two or no multiple of
        world_size, so the table has a power of two of rows: with shards=4, 3 ranks are refused.
        """
        own = self.statistics()
        if own:
            parts = max(1, len(self._copies))
            table = context.all_gather(row(own, context.device)).view(context.ranks.world_size * parts, -1)
            fill(statistics(self._model), pairwise_sum(table) / len(table))
        self.reset()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def row(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate the tensors into one float tensor [n]; n is 0 for no tensors."""
    return torch.cat([item.reshape(-1) for item in tensors]) if tensors else torch.zeros(0, device=device)


@torch.no_grad()
def fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    """Split a row into the tensors: the inverse of ``row``."""
    offset = 0
    for item in tensors:
        item.copy_(values[offset : offset + item.numel()].view(item.shape))
        offset += item.numel()


def spread(table: Tensor, world_size: int) -> Tensor:
    """Return ``world_size`` rows for a table [ranks, n]: its own, or if the numbers differ, its mean for every rank."""
    if table.shape[0] == world_size:
        return table
    return table.mean(0, keepdim=True).expand(world_size, -1).contiguous()


def rows_of_ranks(table: Tensor, world_size: int) -> Tensor:
    """Join the rows of neighbouring parts [parts, n] to rows of ranks [world_size, parts ÷ world_size × n]."""
    return table.reshape(world_size, table.numel() // world_size)


def rows_of_parts(table: Tensor, parts: int) -> Tensor:
    """Divide rows of ranks into rows of parts [parts, n]."""
    return table.reshape(parts, table.numel() // parts)
