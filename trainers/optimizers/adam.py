"""Adam: a method for stochastic optimization (Kingma, Ba 2015)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam

from trainers.core.config import OptimizerConfig, below_one
from trainers.optimizers import Optimizer, decay_groups

if TYPE_CHECKING:
    from trainers.optimizers.adamw import AdamWConfig


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """As torch.optim.Adam; weight decay is added to the gradient.

    Attributes:
        beta1: decay of the running mean of gradients.
        beta2: decay of the running mean of their squares.
        eps: added to the divisor.
    """

    elementwise: ClassVar[bool] = True

    name: str = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        for name in ("beta1", "beta2"):
            below_one(f"optimizer.{name}", getattr(self, name))


class Adam(Optimizer):
    """As torch.optim.Adam (weight decay is added to the gradient), or what ``update`` makes of the same state."""

    update: Callable[..., None] = staticmethod(adam)

    def __init__(self, parameters: Sequence[Tensor], config: AdamConfig | AdamWConfig) -> None:
        super().__init__(parameters)
        self.config, self._groups = config, decay_groups(config, self.parameters)
        self.mean = [torch.zeros_like(item) for item in self.parameters]
        self.square = [torch.zeros_like(item) for item in self.parameters]
        self.steps = [torch.zeros((), device=item.device) for item in self.parameters]

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        gradients = self.gradients()
        for group in self._groups:
            self.update(
                group.of(self.parameters),
                group.of(gradients),
                group.of(self.mean),
                group.of(self.square),
                [],
                group.of(self.steps),
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=lr,
                weight_decay=group.weight_decay,
                eps=self.config.eps,
                maximize=False,
            )

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"mean": self.mean, "square": self.square, "steps": self.steps}


def build(config: AdamConfig, parameters: Sequence[Tensor]) -> Adam:
    """See trainers.optimizers."""
    return Adam(parameters, config)
