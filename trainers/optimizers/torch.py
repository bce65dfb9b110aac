"""Any class of torch.optim: ``optimizer=torch optimizer.class_name=RAdam optimizer.arguments.eps=1e-6``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainers.core.config import ConfigError, OptimizerConfig
from trainers.optimizers.torch_classes import TorchOptimizer, from_class

_OWN = ("lr", "weight_decay")  # set by other fields
_UNFIT = {
    "LBFGS": "it evaluates the loss several times in a step",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it takes matrices only; optimizer=muon gives it those, and the rest to AdamW",
}

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@dataclass(kw_only=True)
class TorchConfig(OptimizerConfig):
    """A class of torch.optim by its name. ``lr`` and ``weight_decay`` are passed on, and torch's defaults are kept for
    the rest; its fused form is taken where it has one.

    Attributes:
        class_name: the class.
        arguments: its other arguments, by name: {betas: [0.9, 0.95]}.
    """

    name: str = "torch"
    class_name: str = "AdamW"
    lr: float = 1e-3
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """True if the class is elementwise; Adafactor, for example, takes means over rows and columns."""
        return self.class_name in _ELEMENTWISE

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        if self.class_name in _UNFIT:
            raise ConfigError(f"optimizer.class_name={self.class_name} can't be used: {_UNFIT[self.class_name]}")
        for name in self.arguments:
            if name == "params":
                raise ConfigError("optimizer.arguments.params are the model's; leave it out")
            if name in _OWN:
                raise ConfigError(f"optimizer.arguments.{name} is said by optimizer.{name}; set that")


def build(config: TorchConfig, parameters: Sequence[Tensor]) -> TorchOptimizer:
    """See trainers.optimizers. Raises ConfigError: torch has no such class, or the class no such argument."""
    try:
        return from_class(_class(config.class_name), config, parameters, config.arguments)
    except (TypeError, ValueError, RuntimeError, LookupError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        said = f"{type(error).__name__} ({error})" if isinstance(error, LookupError) else error  # KeyError: only a key
        raise ConfigError(f"torch.optim.{config.class_name} refuses {config.arguments}: {said}") from error


def _class(name: str) -> Callable[..., torch.optim.Optimizer]:
    base = torch.optim.Optimizer
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and key not in _UNFIT
    }
    if name not in classes:
        version = torch.__version__.partition("+")[0]
        raise ConfigError(
            f"optimizer.class_name={name!r} is no class of torch.optim in torch {version}; choose one of: "
            + ", ".join(sorted(classes))
        )
    return classes[name]
