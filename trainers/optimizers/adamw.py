"""AdamW: Decoupled weight decay regularization (Loshchilov, Hutter 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainers.core.config import OptimizerConfig, below_one
from trainers.optimizers.torch import TorchOptimizer, from_class


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """As torch.optim.AdamW; a step takes the share lr × weight_decay off the weights.

    Attributes:
        beta1: decay of the running mean of gradients.
        beta2: decay of the running mean of their squares.
        eps: added to the divisor.
    """

    elementwise: ClassVar[bool] = True

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        for name in ("beta1", "beta2"):
            below_one(f"optimizer.{name}", getattr(self, name))


def build(config: AdamWConfig, parameters: Sequence[Tensor]) -> TorchOptimizer:
    arguments = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return from_class(torch.optim.AdamW, config, parameters, arguments)
