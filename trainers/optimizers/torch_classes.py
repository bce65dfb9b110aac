"""Classes of torch.optim as optimizers of a training; importing one's class for real imports torch._dynamo.

What ``torch``, ``muon`` and ``own`` share. No option of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.core.config import ConfigError, OptimizerConfig
from trainers.optimizers import Optimizer, decay_groups

Make = Callable[[], Sequence[torch.optim.Optimizer]]
_OWN = ("params", "lr", "weight_decay")  # said by other fields


class TorchOptimizer(Optimizer):
    """Optimizers of torch, each with some of the parameters, stepped together and at one learning rate.

    torch makes an optimizer's state in its first step, and a checkpoint is loaded before that. So one step is done
    when this is made, and what it did to the parameters is taken back; the first update of the run begins with new
    optimizers, and computes what torch's would.
    """

    def __init__(self, parameters: Sequence[Tensor], make: Make) -> None:
        """``make`` returns new optimizers of ``parameters``. Raises ConfigError: no checkpoint can hold their state."""
        super().__init__(parameters)
        self._make = make
        self._updates = torch.tensor(0)  # of the run so far; on the CPU: each step looks at it
        self._optimizers = make()
        self._make_state()

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """See Optimizer. With ``found_inf`` this waits for the device, as torch.amp.GradScaler does."""
        if found_inf is not None and bool(found_inf):
            return
        if not self._updates:
            self._optimizers = self._make()
        self.gradients()  # refuses a parameter without one, which torch's step leaves out without a word
        self._step(lr)
        self._updates += 1

    def state(self) -> Mapping[str, list[Tensor]]:
        found = {"updates": [self._updates]}
        for name, value in self._values():
            if isinstance(value, Tensor):
                found.setdefault(name, []).append(value)
        return found

    def _step(self, lr: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    @torch.no_grad()
    def _make_state(self) -> None:
        if any(item.is_meta for item in self.parameters):  # only the size is asked for, and a step may need values
            for optimizer in self._optimizers:
                for item in (one for group in optimizer.param_groups for one in group["params"]):
                    optimizer.state[item] = {"first": torch.zeros_like(item), "second": torch.zeros_like(item)}
            return
        before = [(item, item.grad, item.detach().clone()) for item in self.parameters]
        for item in self.parameters:
            item.grad = torch.zeros_like(item)
        self._step(0.0)
        for item, gradient, weights in before:
            item.grad = gradient
            item.copy_(weights)
        for name, value in self._values():
            if value is not None and not isinstance(value, Tensor):
                raise ConfigError(f"a checkpoint can't hold {name}, which is {type(value).__name__}; take another")

    def _values(self) -> list[tuple[str, object]]:
        """Everything that the optimizers keep: ``class.name``, and the value for one parameter, in their order."""
        order = {id(item): place for place, item in enumerate(self.parameters)}
        return [
            (f"{type(optimizer).__name__}.{name}", value)
            for optimizer in self._optimizers
            for item in sorted(
                (item for group in optimizer.param_groups for item in group["params"]),
                key=lambda item: order.get(id(item), -1),  # muon's are views
            )
            for name, value in optimizer.state[item].items()
        ]


def param_groups(config: OptimizerConfig, parameters: Sequence[Tensor]) -> Any:
    """What a class of torch.optim gets as ``params``: a list, or groups where some are spared from weight decay."""
    everything = list(parameters)
    groups = decay_groups(config, everything)
    if config.decay_bias_and_norm:
        return everything
    return [{"params": group.of(everything), "weight_decay": group.weight_decay} for group in groups]


def from_class(
    found: Callable[..., torch.optim.Optimizer],
    config: OptimizerConfig,
    parameters: Sequence[Tensor],
    arguments: Mapping[str, Any],
    *,
    field: str = "optimizer.arguments",
) -> TorchOptimizer:
    """An optimizer by its class, with ``lr`` and ``weight_decay`` of the configuration and its fused form if any.

    Raises:
        ConfigError: the class doesn't take these arguments; ``field`` names where they stand.
    """
    called = f"{found.__module__.removesuffix(f'.{found.__name__.lower()}')}.{found.__name__}"
    names = [*inspect.signature(found).parameters]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    if "fused" in names and "foreach" not in given:
        given.setdefault("fused", True)
    if "weight_decay" in names:
        given["weight_decay"] = config.weight_decay
    elif config.weight_decay or not config.decay_bias_and_norm:
        raise ConfigError(
            f"{called} has no weight decay; take optimizer.weight_decay=0 optimizer.decay_bias_and_norm=true"
        )
    for name in given:
        if name not in names:
            valid = ", ".join(sorted({*names} - {*_OWN}))
            raise ConfigError(f"{field}.{name} is no argument of {called}: {valid}")
    make = functools.partial(found, param_groups(config, parameters), lr=config.lr, **given)
    return TorchOptimizer(parameters, lambda: [make()])
