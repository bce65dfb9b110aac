"""The interface of optimizers. Each optimizer is a module here, with its settings and ``build(config, parameters)``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainers.core import options
from trainers.core.config import OptimizerConfig


class Optimizer(ABC):
    """Updates ``parameters`` in place from their ``.grad``; ``state()`` is its whole state."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters: list[Tensor] = list(parameters)

    @abstractmethod
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """Update once with learning rate ``lr``, unless ``found_inf`` (scalar, on the device) is 1.0."""

    @abstractmethod
    def state(self) -> Mapping[str, list[Tensor]]:
        """Return named lists of tensors, in parameter order; a checkpoint is loaded by copying into them."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients in parameter order. Raises RuntimeError if a parameter has none."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(gradients) != len(self.parameters):
            raise RuntimeError(f"{len(self.parameters) - len(gradients)} parameters got no gradient in this step")
        return gradients


def build(config: OptimizerConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """Build the configured optimizer. Raises ConfigError if there is none of that name."""
    optimizer: Optimizer = options.module("optimizer", config.name).build(config, parameters)
    return optimizer


def peak_lr(config: OptimizerConfig, world_size: int) -> float:
    """Return ``lr`` scaled with the world size by ``lr_scaling``."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[config.lr_scaling]
    return config.lr * factor
