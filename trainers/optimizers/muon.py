"""torch.optim.Muon (Jordan 2024) for filter banks and hidden matrices, torch.optim.AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.core.config import OptimizerConfig, below_one
from trainers.optimizers.torch import TorchOptimizer, param_groups


@dataclass(kw_only=True)
class MuonConfig(OptimizerConfig):
    """torch.optim.Muon for convolution filters and hidden matrices; AdamW for the last matrix (the head) and vectors.

    Muon's steps are scaled to the size of AdamW's (Liu et al.: Muon is scalable for LLM training, 2025), so that one
    ``lr`` and one ``weight_decay`` serve both.

    Attributes:
        momentum: Muon's, of the gradients that are made orthogonal.
    """

    name: str = "muon"
    lr: float = 2e-3
    weight_decay: float = 0.1
    momentum: float = 0.95

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        below_one("optimizer.momentum", self.momentum)


class Muon(TorchOptimizer):
    """torch.optim.Muon for filter banks [out, in, h, w], as views [out, in·h·w] in the order of their memory."""

    def __init__(self, parameters: Sequence[Tensor], config: MuonConfig) -> None:
        matrices = [item for item in parameters if item.dim() > 1]
        hidden = matrices[:-1]
        # (filter bank, matrix over the same memory)
        self._views = [(item, _in_order(item.detach(), item).view(item.shape[0], -1)) for item in hidden]
        rest = [item for item in parameters if not any(item is matrix for matrix in hidden)]
        super().__init__(parameters, lambda: _optimizers([view for _, view in self._views], rest, config))

    def _step(self, lr: float) -> None:
        for bank, view in self._views:
            view.grad = None if bank.grad is None else _in_order(bank.grad, bank).reshape(view.shape)
        super()._step(lr)


def _optimizers(views: list[Tensor], rest: list[Tensor], config: MuonConfig) -> list[torch.optim.Optimizer]:
    lr, decay, optimizers = config.lr, config.weight_decay, list[torch.optim.Optimizer]()
    if views:  # torch refuses an empty list
        scale = "match_rms_adamw"
        optimizers.append(torch.optim.Muon(views, lr, weight_decay=decay, momentum=config.momentum, adjust_lr_fn=scale))
    if rest:
        optimizers.append(torch.optim.AdamW(param_groups(config, rest), lr, weight_decay=decay, fused=True))
    return optimizers


def _in_order(values: Tensor, bank: Tensor) -> Tensor:
    """Permute the dimensions of [out, …] after the first into the order in which ``bank`` lies in memory."""
    strides = bank.stride()
    return values.permute(0, *sorted(range(1, bank.dim()), key=lambda dimension: -strides[dimension]))


def build(config: MuonConfig, parameters: Sequence[Tensor]) -> Muon:
    return Muon(parameters, config)
