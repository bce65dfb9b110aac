"""Classes of torch.optim as optimizers of a training; importing one's class for real imports torch._dynamo.

What ``torch`` and ``muon`` share. No option of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainers.core.config import ConfigError
from trainers.optimizers import Optimizer

Make = Callable[[], Sequence[torch.optim.Optimizer]]


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
        """Everything that the optimizers keep: ``class.name``, and the value for one parameter."""
        return [
            (f"{type(optimizer).__name__}.{name}", value)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for item in group["params"]
            for name, value in optimizer.state[item].items()
        ]
