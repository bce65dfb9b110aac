"""How weights, gradients and optimizer state lie on the ranks: whole on each (ddp), or in slices (fsdp)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from trainers import optimizers, weights
from trainers.config import DDPConfig, OptimizerConfig, TrainConfig
from trainers.distributed import Node
from trainers.errors import TrainerError
from trainers.gradients import GradientAverager
from trainers.shared_memory import share_memory

STRATEGIES = {"fsdp": "trainers.strategies.fsdp"}  # imported on use: FSDP imports torch._dynamo

_SHARE = 0.5  # of a device's memory for the state; activations and data need the rest


class Averager(Protocol):
    """The gradients of a step: ``start``, backward passes, ``send_next`` before the last of them, ``finish``."""

    def start(self, step: int) -> None: ...

    def send_next(self) -> None: ...

    def finish(self) -> None:
        """Then ``.grad`` of each of the layout's parameters holds the mean over the ranks."""
        ...

    def state(self) -> dict[str, list[Tensor]]: ...

    def own(self) -> list[Tensor]: ...


class Layout:
    """Where the weights are: whole on every rank. ``parameters`` are what the optimizer changes in place."""

    name = "ddp"

    def __init__(self, model: nn.Module, node: Node) -> None:
        self.model, self.node = model, node
        self.parameters: list[Tensor] = [*trainable(model)]

    def agree(self, found_inf: Tensor) -> Tensor:
        """The ranks' common answer whether gradients are finite: each has seen the same ones."""
        return found_inf

    def weights(self) -> dict[str, Tensor]:
        """The whole state dict, copied, contiguous on the CPU, for rank 0; empty on others. Every rank calls it."""
        return weights.plain(self.model) if self.node.leads else {}

    def replicated(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Of the model's and the optimizer's state what all ranks have alike: here everything."""
        return self.model.state_dict(), dict(state)

    def look(self, folder: Path) -> None:
        """Find out which ranks see the checkpoint folder of rank 0."""

    def save(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Write what is not replicated; relative path → sha256 of each file, on rank 0. Every rank calls it."""
        return {}

    def load(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> None:
        """The inverse, in place."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """``reason`` says why ``auto`` took it, and is empty where the configuration says which."""

    layout: Layout
    averager: Averager
    reason: str = ""


def build(config: TrainConfig, model: nn.Module, node: Node, precision: str) -> Strategy:
    """Lay the model out over the ranks as ``config.strategy`` says. Every rank calls it.

    Raises:
        ConfigError, TrainerError: optimizer, device or backend can't do what the strategy needs.
    """
    name, reason = config.strategy.name, ""
    if name == "auto":
        parameter_bytes = sum(item.nbytes for item in model.parameters())
        name, reason = choose(
            parameter_bytes,
            optimizer_bytes(config.optimizer, trainable(model)),
            device_bytes=node.smallest(device_bytes(node)),
            world_size=node.ranks.world_size,
        )
    if name in STRATEGIES:
        layout, averager = importlib.import_module(STRATEGIES[name]).build(config, model, node, precision)
        return Strategy(layout=layout, averager=averager, reason=reason)
    ddp = config.strategy if isinstance(config.strategy, DDPConfig) else DDPConfig()
    if ddp.compression == "bf16" and node.ranks.world_size > 1 and node.backend != "nccl":
        raise TrainerError(
            f"strategy.compression=bf16 needs the backend nccl, and this run has {node.backend}; "
            "choose strategy.compression=fp16"
        )
    parameters, memory = trainable(model), None
    if ddp.compression == "none" and all(item.dtype == torch.float32 for item in parameters):
        memory = share_memory(sum(item.numel() for item in parameters), node)
    averager = GradientAverager(parameters, node.ranks.world_size, ddp, memory)
    return Strategy(layout=Layout(model, node), averager=averager, reason=reason)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [item for item in model.parameters() if item.requires_grad]


def choose(parameter_bytes: int, optimizer_bytes: int, *, device_bytes: int, world_size: int) -> tuple[str, str]:
    """ddp or fsdp, and why: ddp where weights, gradients and optimizer state take at most half of the memory."""
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
    """What an optimizer's state for these parameters takes, without making it."""
    shapes = [nn.Parameter(torch.empty_like(item, device="meta")) for item in parameters]
    return sum(item.nbytes for items in optimizers.build(config, shapes).state().values() for item in items)


def device_bytes(node: Node) -> int:
    """The memory of this rank's device; of a host's memory, or of a GPU that ranks share, this rank's part."""
    ranks = node.ranks.local_world_size
    if node.device.type == "cuda":
        sharing = -(-ranks // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(node.device).total_memory) // sharing
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):,.1f} MiB"
