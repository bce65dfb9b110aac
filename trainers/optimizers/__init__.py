"""What an optimizer is to the training. Each one is a module here, with its settings and ``build(config, parameters)``.

torch's functional forms are called, not its Optimizer classes: constructing one of those imports
torch._dynamo, which costs every rank 2 to 8 seconds before its first step and is used for nothing here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from trainers.core import options
from trainers.core.config import OptimizerConfig


class DecayGroup(NamedTuple):
    """Some of an optimizer's parameters, by their places, and the weight decay of these."""

    places: list[int]
    weight_decay: float

    def of(self, items: list[Tensor]) -> list[Tensor]:
        """Those of ``items``, one a parameter, that belong to the group; none of none."""
        return items if len(items) in (0, len(self.places)) else [items[place] for place in self.places]


def decay_groups(config: OptimizerConfig, parameters: Sequence[Tensor]) -> list[DecayGroup]:
    """One group of all, or two where biases and normalisation layers are spared.

    These are known by their one dimension, as timm's and most recipes' rule is; a slice of a tensor has as many
    dimensions as the whole.
    """
    spared = [place for place, item in enumerate(parameters) if item.dim() <= 1 and not config.decay_bias_and_norm]
    rest = sorted({*range(len(parameters))} - {*spared})
    return [DecayGroup(*group) for group in ((rest, config.weight_decay), (spared, 0.0)) if group[0]]


class Optimizer(ABC):
    """Updates ``parameters`` in place from their ``.grad``; its whole state is ``state()``."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters: list[Tensor] = list(parameters)

    @abstractmethod
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """One update with learning rate ``lr``; none where ``found_inf`` (scalar, on the device) is 1.0."""

    @abstractmethod
    def state(self) -> Mapping[str, list[Tensor]]:
        """Named lists, one tensor a parameter; load a checkpoint by copying into them."""

    def gradients(self) -> list[Tensor]:
        """The gradients in parameter order. Raises RuntimeError where a parameter took no part."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(found) != len(self.parameters):
            raise RuntimeError(f"{len(self.parameters) - len(found)} parameters got no gradient in this step")
        return found


def build(config: OptimizerConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer that a configuration names. Raises ConfigError: there is none of that name."""
    optimizer: Optimizer = options.module("optimizer", config.name).build(config, parameters)
    return optimizer


def peak_lr(config: OptimizerConfig, world_size: int) -> float:
    """``lr`` after scaling with the world size as ``lr_scaling`` says."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[config.lr_scaling]
    return config.lr * factor
