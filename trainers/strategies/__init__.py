"""How weights, gradients and optimizer state lie on the ranks: whole on each (ddp), or in slices (fsdp).

Each strategy is a module here, with its settings and ``build(config, model, node, precision)``, imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from trainers.checkpoint import weights
from trainers.core import options
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import Node


class GradientSync(Protocol):
    """The gradients of a step: ``start``, a backward pass in each ``micro_batch``, ``finish``."""

    warm_up_passes: int
    """Passes that each process must make before its first step, fresh or resumed; then ``warmed_up``."""

    def start(self, step: int) -> None:
        """Forget the gradients of the step before. ``step`` counts the steps of the run from 0; warm-up passes count
        up to -1."""
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a loss that is divided by the number of a rank's micro-batches."""
        ...

    def next_part(self) -> None:
        """Another part of this rank follows (trainer.shards)."""
        ...

    def finish(self) -> None:
        """Then ``.grad`` of each of the layout's parameters holds the mean over the ranks; with trainer.shards the sum
        over the parts, whose losses are divided by their number."""
        ...

    def warmed_up(self) -> None:
        """Nothing of the warm-up passes is left; ``state`` and ``own`` now have their tensors."""
        ...

    def state(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps and all ranks have alike."""
        ...

    def own(self) -> list[Tensor]:
        """What a checkpoint keeps and each rank has of its own."""
        ...


class LocalGradients:
    """Gradients that are whole after the backward pass: nothing is sent afterwards and nothing is kept of them."""

    warm_up_passes = 0

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def start(self, step: int) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def next_part(self) -> None:
        raise AssertionError("a rank has several parts with trainer.shards alone")

    def finish(self) -> None:
        """Raises TrainerError naming a parameter that took no part in the loss."""
        refuse_missing(self._parameters)

    def warmed_up(self) -> None:
        pass

    def state(self) -> dict[str, list[Tensor]]:
        return {}

    def own(self) -> list[Tensor]:
        return []


class Layout:
    """Where the weights are: whole on every rank. ``parameters`` are what the optimizer changes in place."""

    name = "ddp"

    def __init__(self, model: nn.Module, node: Node) -> None:
        self.model, self.node = model, node
        self.parameters: list[Tensor] = [*trainable(model)]

    def agree(self, found_inf: Tensor) -> Tensor:
        """The ranks' common answer whether gradients are finite: each has seen the same ones."""
        return found_inf

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient from that of ``parameters`` here: each rank has the same, whole ones."""
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The whole state dict, copied, contiguous on the CPU, for rank 0; empty on others. Every rank calls it."""
        return weights.plain(self.model) if self.node.is_rank_zero else {}

    def replicated(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Of the model's and the optimizer's state what all ranks have alike: here everything."""
        return self.model.state_dict(), dict(state)

    def look(self, folder: Path) -> None:
        """Find out which ranks see the checkpoint folder of rank 0."""

    def save(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Write what is not replicated; relative path → sha256 of each file, on rank 0. Every rank calls it."""
        return {}

    def load(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> None:
        """The inverse, in place."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """``network`` is what the training calls: the model, compiled or wrapped as the strategy needs it.

    ``reason`` says why ``auto`` took it, and is empty where the configuration says which.
    """

    layout: Layout
    network: nn.Module
    gradient_sync: GradientSync
    reason: str = ""


def build(config: TrainConfig, model: nn.Module, node: Node, precision: str) -> Strategy:
    """Lay the model out over the ranks as ``config.strategy`` says. Every rank calls it.

    Raises:
        ConfigError, TrainerError: optimizer, device or backend can't do what the strategy needs.
    """
    strategy: Strategy = options.module("strategy", config.strategy.name).build(config, model, node, precision)
    return strategy


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [item for item in model.parameters() if item.requires_grad]


def named_trainable(model: nn.Module) -> dict[str, Tensor]:
    """The same by their names."""
    return {name: item for name, item in model.named_parameters() if item.requires_grad}


def refuse_missing(parameters: Mapping[str, Tensor]) -> None:
    """Raises TrainerError naming the first parameter that has no gradient."""
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    if missing:
        more = f" (nor did {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise TrainerError(
            f"{missing[0]} took no part in the loss{more}; use it in forward, remove it, or freeze it with "
            "requires_grad_(False)"
        )
