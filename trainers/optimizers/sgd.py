"""Stochastic gradient descent, by default with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainers.core.config import ConfigError, OptimizerConfig, below_one
from trainers.optimizers.torch import TorchOptimizer, from_class


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """As torch.optim.SGD without dampening.

    Attributes:
        momentum: decay of the running sum of gradients; 0: none is kept.
        nesterov: look ahead along the momentum.
    """

    elementwise: ClassVar[bool] = True

    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        below_one("optimizer.momentum", self.momentum)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov=true needs optimizer.momentum greater than 0")


def build(config: SGDConfig, parameters: Sequence[Tensor]) -> TorchOptimizer:
    arguments = {"momentum": config.momentum, "nesterov": config.nesterov}
    return from_class(torch.optim.SGD, config, parameters, arguments)
