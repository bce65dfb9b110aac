"""Stochastic gradient descent, with Nesterov momentum unless it is switched off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trainers.core.config import ConfigError, OptimizerConfig, below_one
from trainers.optimizers import Optimizer, decay_groups


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


class SGD(Optimizer):
    """As torch.optim.SGD without dampening. A momentum buffer of zeros makes the first step the same."""

    def __init__(self, parameters: Sequence[Tensor], config: SGDConfig) -> None:
        super().__init__(parameters)
        self.config, self._groups = config, decay_groups(config, self.parameters)
        self.momentum = [torch.zeros_like(item) for item in self.parameters] if config.momentum else []

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        gradients = self.gradients()
        for group in self._groups:
            buffers: list[Tensor | None] = list(group.of(self.momentum)) or [None] * len(group.places)
            sgd(
                group.of(self.parameters),
                group.of(gradients),
                buffers,
                fused=True,
                found_inf=found_inf,
                weight_decay=group.weight_decay,
                momentum=self.config.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=self.config.nesterov,
                maximize=False,
            )

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"momentum": self.momentum}


def build(config: SGDConfig, parameters: Sequence[Tensor]) -> SGD:
    """See trainers.optimizers."""
    return SGD(parameters, config)
