"""Airbench's Muon: orthogonalised momentum for hidden matrices (Jordan 2024), SGD for the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trainers.core.config import ConfigError, OptimizerConfig, at_least
from trainers.optimizers import Optimizer

_SHORTEST = 1e-7  # avoids a division by 0 for a zero direction, which makes no step
# Coefficients of a·x + b·x³ + c·x⁵: steep at 0, so that a few rounds move singular values near 1 (0.7 to 1.2).
# Bernstein, Newhouse: Old optimizer, new norm, 2024; coefficients from Jordan's description of Muon.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315


@dataclass(kw_only=True)
class AirbenchMuonConfig(OptimizerConfig):
    """Orthogonalised momentum for convolution filters and hidden matrices (Jordan 2024). The last matrix (the head) and
    everything with one dimension are updated by SGD with Nesterov momentum, at learning rates of their own.

    The schedule acts on all three rates.

    Attributes:
        lr: length of a step of a filter bank (the weights of a layer), as a share of the bank's norm.
        weight_decay: the share that a step at the peak of the schedule takes off head and biases.
        momentum: decay of the running sum of gradients that is made orthogonal.
        iterations: of Newton-Schulz.
        head_lr: the learning rate of the last matrix.
        bias_lr: the learning rate of everything with one dimension.
        sgd_momentum: momentum of head and biases.
    """

    name: str = "airbench_muon"
    lr: float = 0.1
    momentum: float = 0.6
    iterations: int = 3
    head_lr: float = 0.1
    bias_lr: float = 0.1
    sgd_momentum: float = 0.85

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        for name in ("momentum", "sgd_momentum"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must lie in (0, 1)")
        for name in ("head_lr", "bias_lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be greater than 0")
        at_least("optimizer.iterations", self.iterations, 1)


class AirbenchMuon(Optimizer):
    """Jordan et al.: Muon, an optimizer for hidden layers in neural networks, 2024.

    A step moves a filter bank [out, …], a matrix of ``out`` rows, along its orthogonalised momentum by ``lr`` times its
    norm, which is kept at √rows. SGD updates the last matrix and vectors.
    """

    def __init__(self, parameters: Sequence[Tensor], config: AirbenchMuonConfig) -> None:
        super().__init__(parameters)
        self.config = config
        self.momentum = [torch.zeros_like(item) for item in self.parameters]
        # indices into ``parameters``; banks of one shape are made orthogonal together, as a batch
        matrices = [index for index, item in enumerate(self.parameters) if item.dim() > 1]
        self._head = matrices[-1:]
        self._biases = [index for index, item in enumerate(self.parameters) if item.dim() <= 1]
        self._banks: dict[torch.Size, list[int]] = {}  # shape of the matrix → which parameters have it
        for index in matrices[:-1]:
            self._banks.setdefault(_matrix(self.parameters[index]).shape, []).append(index)

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        gradients, share = self.gradients(), lr / self.config.lr
        decay = self.config.weight_decay
        self._descend(self._head, gradients, self.config.head_lr, share, decay, found_inf)
        bias_decay = decay if self.config.decay_bias_and_norm else 0.0
        self._descend(self._biases, gradients, self.config.bias_lr, share, bias_decay, found_inf)
        for indices in self._banks.values():
            self._update_banks(indices, gradients, lr, found_inf)

    def state(self) -> Mapping[str, list[Tensor]]:
        return {"momentum": self.momentum}

    def _descend(
        self,
        indices: list[int],
        gradients: list[Tensor],
        peak: float,
        share: float,
        decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update with SGD with Nesterov momentum at ``share`` of the rate ``peak``."""
        buffers: list[Tensor | None] = [self.momentum[index] for index in indices]
        sgd(
            [self.parameters[index] for index in indices],
            [gradients[index] for index in indices],
            buffers,
            fused=True,
            found_inf=found_inf,
            weight_decay=decay / peak,
            momentum=self.config.sgd_momentum,
            lr=peak * share,
            dampening=0.0,
            nesterov=True,
            maximize=False,
        )

    def _update_banks(self, indices: list[int], gradients: list[Tensor], lr: float, found_inf: Tensor | None) -> None:
        """Update filter banks of one shape along their orthogonalised momentum."""
        skips = None if found_inf is None else found_inf > 0  # a tensor on the device: nobody waits for it
        directions = []
        for index in indices:
            gradient, momentum = gradients[index], self.momentum[index]
            new_momentum = momentum * self.config.momentum + gradient
            directions.append(_matrix(gradient + new_momentum * self.config.momentum))  # Nesterov's
            momentum.copy_(new_momentum if skips is None else torch.where(skips, momentum, new_momentum))
        orthogonal = orthogonalised(torch.stack(directions), self.config.iterations)
        for index, direction in zip(indices, orthogonal, strict=True):
            bank = self.parameters[index]
            rows = bank.shape[0]
            step = direction * (math.sqrt(rows) / direction.norm().clamp(min=_SHORTEST))
            moved = bank * (math.sqrt(rows) / bank.norm()) - lr * step.view_as(bank)
            bank.copy_(moved if skips is None else torch.where(skips, bank, moved))


def _matrix(bank: Tensor) -> Tensor:
    """View a filter bank [out, …] as a matrix [out, rest]."""
    return bank.reshape(bank.shape[0], -1)


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows (or columns) by Newton–Schulz iterations.

    [n, rows, columns] → the same shape in fp32. Computed in bf16 on a GPU.
    """
    values = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    values = values / (values.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    upright = values.shape[1] > values.shape[2]
    if upright:  # transpose, as the products have the size of the first dimension
        values = values.mT
    for _ in range(iterations):
        square = values @ values.mT
        values = _LINEAR * values + (_CUBIC * square + _QUINTIC * square @ square) @ values
    result: Tensor = values.mT if upright else values
    return result.float()


def build(config: AirbenchMuonConfig, parameters: Sequence[Tensor]) -> AirbenchMuon:
    return AirbenchMuon(parameters, config)
