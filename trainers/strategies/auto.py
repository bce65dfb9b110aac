"""Choose ddp if the whole training state fits into half of a device's memory, else fsdp; the run reports why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainers import optimizers
from trainers.core.config import OptimizerConfig, StrategyConfig, TrainConfig
from trainers.distributed.process_group import RankContext
from trainers.strategies import Strategy, ddp, fsdp, trainable

_SHARE = 0.5  # share of a device's memory for the state; activations and data need the rest


@dataclass(kw_only=True)
class AutoConfig(StrategyConfig):
    """Nothing more to set: ddp and fsdp have their defaults."""

    name: str = "auto"


def build(config: TrainConfig, model: nn.Module, context: RankContext, precision: str) -> Strategy:
    """See trainers.strategies."""
    name, reason = choose(
        sum(item.nbytes for item in model.parameters()),
        optimizer_bytes(config.optimizer, trainable(model)) + average_bytes(config, model),
        device_bytes=context.all_reduce_min(device_bytes(context)),
        world_size=context.ranks.world_size,
    )
    if name == "ddp":
        return replace(ddp.build(config, model, context, precision), reason=reason)
    return replace(fsdp.build(config, model, context, precision), reason=reason)


def choose(parameter_bytes: int, optimizer_bytes: int, *, device_bytes: int, world_size: int) -> tuple[str, str]:
    """Return (ddp or fsdp, reason): ddp if weights, gradients and optimizer state take at most half of the memory."""
    needed = 2 * parameter_bytes + optimizer_bytes
    room = int(device_bytes * _SHARE)
    what = f"weights, gradients and optimizer state take {_size(needed)}"
    limit = f"half of a rank's {_size(device_bytes)} of memory"
    if world_size == 1:
        return "ddp", "there is one rank, and nothing to share"
    if needed <= room:
        return "ddp", f"{what}, which is at most {limit}"
    return "fsdp", f"{what}, more than {limit}; in {world_size} slices {_size(-(-needed // world_size))} each"


def optimizer_bytes(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> int:
    """Estimate the bytes of an optimizer's state for these parameters, from its state for a 1×1 matrix."""
    state = optimizers.build(config, [nn.Parameter(torch.zeros(1, 1))]).state()
    tensors = [item for items in state.values() for item in items]
    of_an_element = sum(item.nbytes for item in tensors if item.dim())
    of_a_parameter = sum(item.nbytes for item in tensors if not item.dim())
    return sum(of_an_element * item.numel() + of_a_parameter for item in parameters)


def average_bytes(config: TrainConfig, model: nn.Module) -> int:
    """Return the bytes of the running average of the weights (trainer.ema)."""
    return sum(item.nbytes for item in trainable(model)) if config.trainer.ema else 0


def device_bytes(context: RankContext) -> int:
    """Return the memory available to this rank: the GPU's or the host's, divided by the ranks that share it."""
    ranks = context.ranks.local_world_size
    if context.device.type == "cuda":
        sharing = -(-ranks // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(context.device).total_memory) // sharing
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):,.1f} MiB"
