"""The floating-point tensors that are each rank's own: batch statistics between evaluations, unsent gradients.

A checkpoint keeps those of every rank, so that saving one changes nothing: when it happens may depend on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def statistics(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers, in the model's order."""
    return [item for item in model.buffers() if item.is_floating_point()]


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
    wanted, nothing is lost. Columns that the table lacks are 0: one rank alone has no unsent gradients.
    """
    table = functional.pad(table[:, :width], (0, max(0, width - table.shape[1])))
    if table.shape[0] == world_size:
        return table
    return table.mean(0, keepdim=True).expand(world_size, -1).contiguous()
