"""A user-defined optimizer: ``optimizer=own optimizer.target=my_package.optim:Mine optimizer.args.beta=0.9``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainers.core import options
from trainers.core.config import ConfigError, OptimizerConfig, check_target
from trainers.optimizers.torch import TorchOptimizer, from_class


@dataclass(kw_only=True)
class OwnOptimizerConfig(OptimizerConfig):
    """A class that derives from torch.optim.Optimizer. It gets ``lr``, and ``weight_decay`` if its signature has it.

    Attributes:
        target: the class, as package.module:Name.
        args: its other arguments, by name.
    """

    name: str = "own"
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        check_target("optimizer.target", self.target)
        if "params" in self.args:
            raise ConfigError("optimizer.args.params are the model's; leave it out")
        for name in ("lr", "weight_decay"):
            if name in self.args:
                raise ConfigError(f"optimizer.args.{name} is said by optimizer.{name}; set that")


def build(config: OwnOptimizerConfig, parameters: Sequence[Tensor]) -> TorchOptimizer:
    """Build the optimizer. Raises ConfigError: it is no torch.optim.Optimizer, or takes other arguments."""
    optimizer = options.load_target(config.target)
    if not (inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(f"{options.where(config.target)} is no class that derives from torch.optim.Optimizer")
    return from_class(optimizer, config, parameters, config.args, field="optimizer.args")
