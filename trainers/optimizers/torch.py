"""The adapter of torch.optim's classes to our interface. ``optimizer=torch optimizer.class_name=RAdam`` takes any
class; most other optimizers of this package are built with ``TorchOptimizer`` or ``from_class``, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainers.core.config import ConfigError, OptimizerConfig
from trainers.optimizers import Optimizer

_OWN = ("lr", "weight_decay")  # set by other fields
_UNFIT = {
    "LBFGS": "it evaluates the loss several times in a step",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it takes matrices only; optimizer=muon gives it those, and the rest to AdamW",
}

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


Make = Callable[[], Sequence[torch.optim.Optimizer]]
"""Returns new optimizers of torch, with their state as at the start."""
_SET_BY_FIELDS = ("params", "lr", "weight_decay")
_SKIPPING = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes whose fused form reads ``found_inf`` on the device, and whose initial state is zero."""


class TorchOptimizer(Optimizer):
    """Optimizers of torch, each with some of the parameters, stepped together with one learning rate.

    torch creates an optimizer's state in its first step, but a checkpoint is loaded before that. So the constructor
    runs a step and undoes it. State whose initial value isn't zero is recreated in the first update of the run.
    """

    def __init__(self, parameters: Sequence[Tensor], make: Make) -> None:
        """``make`` returns new optimizers of ``parameters``. Raises ConfigError if no checkpoint can hold it."""
        super().__init__(parameters)
        self._make, self._optimizers = make, make()
        self._skips = all(type(one) in _SKIPPING and one.defaults["fused"] for one in self._optimizers)
        self._updates = torch.tensor(0)  # updates of the run so far; on the CPU, because each step reads it
        self._make_state()

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """Update once (see Optimizer). With ``found_inf``, classes without a fused form wait for the device."""
        self.gradients()  # raises for a parameter without a gradient, which torch would skip silently
        if self._skips:
            for optimizer in self._optimizers:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
            self._step(lr)
            return
        if found_inf is not None and bool(found_inf):
            return
        if not self._updates:  # the first update of the run: drop the state that ``_make_state`` left
            self._optimizers = self._make()
        self._step(lr)
        self._updates += 1

    def state(self) -> Mapping[str, list[Tensor]]:
        state = {} if self._skips else {"updates": [self._updates]}
        for name, value in self._values():
            if isinstance(value, Tensor):
                state.setdefault(name, []).append(value)
        return state

    def _step(self, lr: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    @torch.no_grad()
    def _make_state(self) -> None:
        """Let torch create the state by a step that changes nothing. Raises ConfigError: it isn't all tensors."""
        gradients = [item.grad for item in self.parameters]
        for item in self.parameters:
            item.grad = item.detach()  # any gradient will do
        if self._skips:  # a step that is skipped changes no weight, and needs no memory for copies
            self.step(0.0, torch.ones((), device=self.parameters[0].device))
        else:
            weights = [item.detach().clone() for item in self.parameters]
            self._step(0.0)
            torch._foreach_copy_(self.parameters, weights)
        for item, gradient in zip(self.parameters, gradients, strict=True):
            item.grad = gradient
        for name, value in self._values():
            if isinstance(value, Tensor):
                if self._skips:
                    value.zero_()  # torch leaves SGD's uninitialised
            elif value is not None:
                raise ConfigError(f"a checkpoint can't hold {name}, which is {type(value).__name__}; take another")

    def _values(self) -> Iterator[tuple[str, object]]:
        """Yield (``class.name``, value) of the optimizers' state, in parameter order."""
        order = {id(item): index for index, item in enumerate(self.parameters)}
        for optimizer in self._optimizers:
            items = [item for group in optimizer.param_groups for item in group["params"]]
            # param_groups may change the order; Muon's tensors are views, in the right order already
            for item in sorted(items, key=lambda item: order.get(id(item), -1)):
                for name, value in optimizer.state[item].items():
                    yield f"{type(optimizer).__name__}.{name}", value


def param_groups(config: OptimizerConfig, parameters: Sequence[Tensor]) -> Any:
    """Return ``params`` for a class of torch.optim: a list, or two groups if some parameters have no weight decay:
    biases and weights of normalisation layers, recognised by their single dimension, as in most recipes.
    """
    if config.decay_bias_and_norm:
        return [*parameters]
    groups = [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def from_class(
    optimizer: Callable[..., torch.optim.Optimizer],
    config: OptimizerConfig,
    parameters: Sequence[Tensor],
    arguments: Mapping[str, Any],
    *,
    field: str = "optimizer.arguments",
) -> TorchOptimizer:
    """Create an optimizer from its class, with ``lr`` and ``weight_decay``, and fused if possible. ``arguments``: the
    user's, of the setting ``field``. Raises ConfigError: the class doesn't take them.
    """
    # torch.optim.adam.Adam is shown as torch.optim.Adam
    class_name = f"{optimizer.__module__.removesuffix(f'.{optimizer.__name__.lower()}')}.{optimizer.__name__}"
    names = [*inspect.signature(optimizer).parameters]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    if "fused" in names and "foreach" not in options:
        options.setdefault("fused", True)
    if "weight_decay" in names:
        options["weight_decay"] = config.weight_decay
    elif config.weight_decay or not config.decay_bias_and_norm:
        raise ConfigError(
            f"{class_name} has no weight decay; take optimizer.weight_decay=0 optimizer.decay_bias_and_norm=true"
        )
    for name in options:
        if name not in names:
            valid = ", ".join(sorted({*names} - {*_SET_BY_FIELDS}))
            raise ConfigError(f"{field}.{name} is no argument of {class_name}: {valid}")
    make = functools.partial(optimizer, param_groups(config, parameters), lr=config.lr, **options)
    return TorchOptimizer(parameters, lambda: [make()])


@dataclass(kw_only=True)
class TorchConfig(OptimizerConfig):
    """A class of torch.optim by its name. It gets ``lr`` and ``weight_decay``; other arguments keep torch's defaults.
    If the class has a fused form, that is used.

    Attributes:
        class_name: the class, such as RAdam.
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
    """Build the optimizer. Raises ConfigError: torch has no such class, or the class no such argument."""
    try:
        return from_class(_class(config.class_name), config, parameters, config.arguments)
    except (TypeError, ValueError, RuntimeError, LookupError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        # the text of a KeyError is only the key
        reason = f"{type(error).__name__} ({error})" if isinstance(error, LookupError) else error
        raise ConfigError(f"torch.optim.{config.class_name} refuses {config.arguments}: {reason}") from error


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
