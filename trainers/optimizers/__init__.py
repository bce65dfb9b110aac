"""SGD and Adam as torch computes them, Muon, and the learning rate as a pure function of the step.

torch's functional forms are called, not its Optimizer classes: constructing one of those imports
torch._dynamo, which costs every rank 2 to 8 seconds before its first step and is used for nothing here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trainers.config import (
    AdamConfig,
    MuonConfig,
    OneCycleScheduleConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
    StepScheduleConfig,
    TriangleScheduleConfig,
)
from trainers.optimizers.newton_schulz import orthogonalised

_SHORTEST = 1e-7  # a direction of no length (no gradient at all) is no step


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


class SGD(Optimizer):
    """As torch.optim.SGD without dampening. A momentum buffer of zeros makes the first step the same."""

    def __init__(self, parameters: Sequence[Tensor], config: SGDConfig) -> None:
        super().__init__(parameters)
        self.config = config
        self.momentum = [torch.zeros_like(item) for item in self.parameters] if config.momentum else []

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        buffers: list[Tensor | None] = list(self.momentum) or [None] * len(self.parameters)
        sgd(
            self.parameters,
            self.gradients(),
            buffers,
            fused=True,
            found_inf=found_inf,
            weight_decay=self.config.weight_decay,
            momentum=self.config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.config.nesterov,
            maximize=False,
        )

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"momentum": self.momentum}


class Adam(Optimizer):
    """As torch.optim.Adam (weight decay is added to the gradient)."""

    def __init__(self, parameters: Sequence[Tensor], config: AdamConfig) -> None:
        super().__init__(parameters)
        self.config = config
        self.mean = [torch.zeros_like(item) for item in self.parameters]
        self.square = [torch.zeros_like(item) for item in self.parameters]
        self.steps = [torch.zeros((), device=item.device) for item in self.parameters]

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        adam(
            self.parameters,
            self.gradients(),
            self.mean,
            self.square,
            [],
            self.steps,
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"mean": self.mean, "square": self.square, "steps": self.steps}


class Muon(Optimizer):
    """Jordan et al.: Muon, an optimizer for hidden layers in neural networks, 2024.

    A filter bank [out, …] is a matrix of ``out`` rows. Its momentum, made orthogonal, moves it by ``lr`` times its
    length, which is kept at √rows. The last matrix and all vectors are SGD's. Banks of one shape are computed at once.
    """

    def __init__(self, parameters: Sequence[Tensor], config: MuonConfig) -> None:
        super().__init__(parameters)
        self.config = config
        self.momentum = [torch.zeros_like(item) for item in self.parameters]
        matrices = [place for place, item in enumerate(self.parameters) if item.dim() > 1]
        self._head = matrices[-1:]
        self._biases = [place for place, item in enumerate(self.parameters) if item.dim() <= 1]
        self._banks: dict[torch.Size, list[int]] = {}  # shape of the matrix → which parameters have it
        for place in matrices[:-1]:
            self._banks.setdefault(_matrix(self.parameters[place]).shape, []).append(place)

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        gradients, share = self.gradients(), lr / self.config.lr
        self._descend(self._head, gradients, self.config.head_lr, share, found_inf)
        self._descend(self._biases, gradients, self.config.bias_lr, share, found_inf)
        for places in self._banks.values():
            self._turn(places, gradients, lr, found_inf)

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"momentum": self.momentum}

    def _descend(
        self, places: list[int], gradients: list[Tensor], peak: float, share: float, found_inf: Tensor | None
    ) -> None:
        """SGD with Nesterov momentum at ``share`` of the rate ``peak``."""
        buffers: list[Tensor | None] = [self.momentum[place] for place in places]
        sgd(
            [self.parameters[place] for place in places],
            [gradients[place] for place in places],
            buffers,
            fused=True,
            found_inf=found_inf,
            weight_decay=self.config.weight_decay / peak,
            momentum=self.config.sgd_momentum,
            lr=peak * share,
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )

    def _turn(self, places: list[int], gradients: list[Tensor], lr: float, found_inf: Tensor | None) -> None:
        """One step of the filter banks at ``places``, which have one shape."""
        keep = None if found_inf is None else found_inf > 0
        directions = []
        for place in places:
            gradient, momentum = gradients[place], self.momentum[place]
            fresh = momentum * self.config.momentum + gradient
            directions.append(_matrix(gradient + fresh * self.config.momentum))
            momentum.copy_(fresh if keep is None else torch.where(keep, momentum, fresh))
        turned = orthogonalised(torch.stack(directions), self.config.iterations)
        for place, direction in zip(places, turned, strict=True):
            bank = self.parameters[place]
            rows = bank.shape[0]
            step = direction * (math.sqrt(rows) / direction.norm().clamp(min=_SHORTEST))
            moved = bank * (math.sqrt(rows) / bank.norm()) - lr * step.view_as(bank)
            bank.copy_(moved if keep is None else torch.where(keep, bank, moved))


def _matrix(bank: Tensor) -> Tensor:
    """[out, …] → [out, rest]."""
    return bank.reshape(bank.shape[0], -1)


def build(config: OptimizerConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer that a configuration names."""
    if isinstance(config, SGDConfig):
        return SGD(parameters, config)
    if isinstance(config, AdamConfig):
        return Adam(parameters, config)
    if isinstance(config, MuonConfig):
        return Muon(parameters, config)
    raise TypeError(f"no optimizer for {type(config).__name__}")


def peak_lr(config: OptimizerConfig, world_size: int) -> float:
    """``lr`` after scaling with the world size as ``lr_scaling`` says."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[config.lr_scaling]
    return config.lr * factor


def lr_at(config: ScheduleConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of step ``step`` (from 0), given the peak. Nothing to store, nothing to resume."""
    if isinstance(config, StepScheduleConfig):
        return float(peak * config.gamma ** (step // steps_per_epoch // config.step_epochs))
    if isinstance(config, OneCycleScheduleConfig):
        return _one_cycle(config, peak, step, total_steps)
    if isinstance(config, TriangleScheduleConfig):
        return peak * _triangle(config, step, total_steps)
    return peak


def _one_cycle(config: OneCycleScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Two half cosines: peak/div_factor → peak → peak/div_factor/final_div_factor, as torch's OneCycleLR."""
    first = peak / config.div_factor
    turn = config.warmup * total_steps - 1
    if step <= turn:
        return _cosine(first, peak, step / turn if turn > 0 else 1.0)
    return _cosine(peak, first / config.final_div_factor, (step - turn) / max(1.0, total_steps - 1 - turn))


def _triangle(config: TriangleScheduleConfig, step: int, total_steps: int) -> float:
    """The share of the peak; the last step is one short of ``end``, so that no step has a rate of 0."""
    turn = config.warmup * total_steps
    if step < turn:
        return config.start + (1 - config.start) * (step + 1) / (turn + 1)
    return config.end + (1 - config.end) * (total_steps - step) / (total_steps - turn)


def _cosine(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * min(1.0, share))) / 2
