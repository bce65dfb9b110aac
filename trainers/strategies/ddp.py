"""Every rank has the whole model, and gradients are averaged during the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainers.core.config import ConfigError, StrategyConfig, TrainConfig, at_least, choice
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import Node
from trainers.strategies import Layout, Strategy, trainable
from trainers.strategies.gradients import GradientAverager
from trainers.strategies.shared_memory import share_memory


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """Every rank has the whole model.

    Attributes:
        compression: for links that are slower than the backward pass: fp16 and bf16 send gradients in half the bytes,
            rounded to 11 and 8 bits; powersgd sends two thin matrices for each large one; none sends all of them.
        powersgd_rank: columns of these matrices.
        powersgd_start_step: the first step that sends them; before it gradients travel whole.
    """

    name: str = "ddp"
    compression: str = "none"
    powersgd_rank: int = 2
    powersgd_start_step: int = 100

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        choice("strategy.compression", self.compression, ("none", "fp16", "bf16", "powersgd"))
        if self.compression == "bf16" and self.backend in ("gloo", "mpi"):
            raise ConfigError(
                f"strategy.compression=bf16 needs the backend nccl, and this is strategy.backend={self.backend}; "
                "choose strategy.compression=fp16"
            )
        at_least("strategy.powersgd_rank", self.powersgd_rank, 1)
        at_least("strategy.powersgd_start_step", self.powersgd_start_step, 0)

    def check(self, config: TrainConfig) -> None:
        """What powersgd didn't send it sends later, so a NaN would stay for ever."""
        skips = config.trainer.skip_nonfinite or config.trainer.precision == "fp16"
        if skips and self.compression == "powersgd":
            raise ConfigError(
                "strategy.compression=powersgd can't leave out a step, as trainer.skip_nonfinite=true and "
                "trainer.precision=fp16 do; choose strategy.compression=fp16, or precision bf16 without skipping"
            )


def build(config: TrainConfig, model: nn.Module, node: Node, precision: str) -> Strategy:
    """See trainers.strategies. Settings of another strategy (auto's) mean the defaults."""
    ddp = config.strategy if isinstance(config.strategy, DDPConfig) else DDPConfig()
    if ddp.compression == "bf16" and node.ranks.world_size > 1 and node.backend != "nccl":
        raise TrainerError(
            f"strategy.compression=bf16 needs the backend nccl, and this run has {node.backend}; "
            "choose strategy.compression=fp16"
        )
    parameters, memory = trainable(model), None
    if ddp.compression == "none" and all(item.dtype == torch.float32 for item in parameters):
        memory = share_memory(sum(item.numel() for item in parameters), node)
    names = [name for name, item in model.named_parameters() if item.requires_grad]
    averager = GradientAverager(parameters, node.ranks.world_size, ddp, memory, names)
    return Strategy(layout=Layout(model, node), averager=averager)
