"""Floating-point state that differs between ranks: batch statistics between evaluations.

A checkpoint keeps that of every rank (with trainer.shards of every part), so that writing one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainers.distributed.process_group import RankContext


def pairwise_sum(rows: Tensor) -> Tensor:
    """Sum [n, …] → […] in the order of a balanced binary tree, for n a power of two; overwrites ``rows``.

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)): a rank holds 1, 2, 4, … neighbouring parts of a global batch,
    that is a whole branch. It sums its branch alone, and the ranks' sums are added in the same tree. Floating-point
    addition is commutative but not associative, so the tree alone determines the bits, on any number of ranks.
    """
    while len(rows) > 1:
        pairs = rows.view(len(rows) // 2, 2, *rows.shape[1:])
        rows = pairs[:, 0].add_(pairs[:, 1])
    return rows[0]


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers, in the model's order."""
    return [item for item in model.buffers() if item.is_floating_point()]


class PartBuffers:
    """One copy of a model's buffers for each of several parts of a rank; the model holds the current one's."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        self._model = model
        self._held = list(model.buffers())
        self._copies = [[item.clone() for item in self._held] for _ in range(parts)] if parts > 1 else []

    @torch.no_grad()
    def reset(self) -> None:
        for copies in self._copies:
            _copy(copies, self._held)

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Return a context in which the model holds the buffers of the rank's part ``number`` (from 0)."""
        if not self._copies:
            yield
            return
        with torch.no_grad():
            _copy(self._held, self._copies[number])
        yield
        with torch.no_grad():
            _copy(self._copies[number], self._held)

    def statistics(self) -> list[Tensor]:
        """Return the floating-point buffers of all parts of this rank, part by part in the model's order."""
        if not self._copies:
            return statistics(self._model)
        return [item for copies in self._copies for item in copies if item.is_floating_point()]

    @torch.no_grad()
    def average(self, context: RankContext) -> None:
        """Set every part of every rank to the mean over all parts, summed pairwise in the order of the parts."""
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
    """Convert rows [ranks, n] to ``world_size`` rows: their mean, as in an evaluation, if the number differs."""
    if table.shape[0] == world_size:
        return table
    return table.mean(0, keepdim=True).expand(world_size, -1).contiguous()


def rows_of_ranks(table: Tensor, world_size: int) -> Tensor:
    """Regroup rows of parts [parts, n] to rows of ranks [world_size, parts ÷ world_size × n]: neighbouring parts."""
    return table.reshape(world_size, table.numel() // world_size)


def rows_of_parts(table: Tensor, parts: int) -> Tensor:
    """Regroup rows of ranks to rows of parts [parts, n]."""
    return table.reshape(parts, table.numel() // parts)
