"""The floating-point tensors that are each rank's own: batch statistics between evaluations, unsent gradients.

A checkpoint keeps those of every rank, so that saving one changes nothing: when it happens may depend on the clock.
With trainer.shards a rank has batch statistics for each of its parts. A checkpoint then has a row for each part, which
any number of ranks can share out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.distributed.pairwise import pairwise_sum
from trainers.distributed.process_group import Node


def statistics(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers, in the model's order."""
    return [item for item in model.buffers() if item.is_floating_point()]


class PartBuffers:
    """A model's buffers, once for each of a rank's parts; the model holds those of the part that is computed.

    A rank with one part needs no copies: the model's own are that part's.
    """

    def __init__(self, model: nn.Module, parts: int) -> None:
        self._model = model
        self._held = list(model.buffers())
        self._copies = [[item.clone() for item in self._held] for _ in range(parts)] if parts > 1 else []

    @torch.no_grad()
    def reset(self) -> None:
        """Each part gets what the model holds."""
        for copies in self._copies:
            _copy(copies, self._held)

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Within, the model holds the buffers of the rank's part ``number`` (from 0)."""
        if not self._copies:
            yield
            return
        with torch.no_grad():
            _copy(self._held, self._copies[number])
        yield
        with torch.no_grad():
            _copy(self._copies[number], self._held)

    def statistics(self) -> list[Tensor]:
        """The floating-point buffers of all parts of this rank, part by part in the model's order."""
        if not self._copies:
            return statistics(self._model)
        return [item for copies in self._copies for item in copies if item.is_floating_point()]

    @torch.no_grad()
    def average(self, node: Node) -> None:
        """Every part of every rank gets the mean over all parts, added up pairwise in the order of the parts."""
        own = self.statistics()
        if own:
            parts = max(1, len(self._copies))
            table = node.all_gather(row(own, node.device)).view(node.ranks.world_size * parts, -1)
            fill(statistics(self._model), pairwise_sum(table) / len(table))
        self.reset()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def row(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """All of them in one float tensor of shape [n]; n is 0 where there are none."""
    return torch.cat([item.reshape(-1) for item in tensors]) if tensors else torch.zeros(0, device=device)


@torch.no_grad()
def fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    """The inverse of ``row``."""
    offset = 0
    for item in tensors:
        item.copy_(values[offset : offset + item.numel()].view(item.shape))
        offset += item.numel()


def spread(table: Tensor, world_size: int, width: int) -> Tensor:
    """A table of rows [ranks, n] for another number of ranks: each gets the mean. The same number keeps its rows.

    Of batch statistics that is what an evaluation sees; of gradients that weren't sent, of which the ranks' mean is
    wanted, nothing is lost. Columns that the table lacks are 0: one rank alone has no unsent gradients. (Rows of parts
    are only divided anew: see ``rows_of_ranks``.)
    """
    table = functional.pad(table[:, :width], (0, max(0, width - table.shape[1])))
    if table.shape[0] == world_size:
        return table
    return table.mean(0, keepdim=True).expand(world_size, -1).contiguous()


def rows_of_ranks(table: Tensor, world_size: int) -> Tensor:
    """Rows of parts [parts, n] → rows of ranks, which hold neighbouring parts, [world_size, parts ÷ world_size × n]."""
    return table.reshape(world_size, table.numel() // world_size)


def rows_of_parts(table: Tensor, parts: int) -> Tensor:
    """The inverse."""
    return table.reshape(parts, table.numel() // parts)
