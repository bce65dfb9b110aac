"""Strategies: how weights, gradients and optimizer state lie on the ranks, replicated (ddp) or sharded (fsdp).

Each strategy is a module here, with its settings and ``build(config, model, context, precision)``, imported on use. The
classes here are what a strategy consists of; they do the work of a single rank, and ddp and fsdp derive from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from trainers.checkpoint import Checkpoint, plain_weights
from trainers.core import options
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext


class GradientSync:
    """Makes the gradients of a step: ``start``, each pass in a ``micro_batch``, ``finish``. Here: of one rank."""

    warm_up_passes = 0
    """Passes that each process must run before its first step, also if it resumes from a checkpoint."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def start(self) -> None:
        """Clear the gradients of the previous step."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass. ``last``: of this rank's micro-batches in the step."""
        return nullcontext()

    def next_part(self) -> None:
        """Begin the next part of this rank (trainer.shards)."""
        raise AssertionError("a rank has several parts with trainer.shards alone")

    def finish(self) -> None:
        """Complete ``.grad``: the mean over ranks (trainer.shards: the sum over parts). Raises TrainerError."""
        refuse_missing(self._parameters)


class Layout:
    """Where the weights lie: here whole on every rank. The optimizer changes ``parameters`` in place. ``state`` of the
    methods is the rest of the training's state, such as the optimizer's (``Stepper.state``).
    """

    name = "ddp"

    def __init__(self, model: nn.Module, context: RankContext) -> None:
        self.model, self.context = model, context
        self.parameters: list[Tensor] = [*trainable(model)]

    def agree(self, found_inf: Tensor) -> Tensor:
        """Combine the ranks' ``found_inf`` (1.0: a gradient isn't finite), which here is the same on all ranks."""
        return found_inf

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the whole gradient, given the norm of this rank's ``parameters``."""
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Return all weights as plain CPU tensors on rank 0, else nothing; every rank must call it."""
        return plain_weights(self.model) if self.context.is_rank_zero else {}

    def replicated(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return the part of the model's and optimizer's state that all ranks hold alike: here everything."""
        return self.model.state_dict(), dict(state)

    def copies(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return the whole state, copied to the CPU, on rank 0, else nothing; every rank must call it."""
        if not self.context.is_rank_zero:
            return {}, {}
        model = {name: on_cpu(value) for name, value in self.model.state_dict().items()}
        return model, {name: [*map(on_cpu, items)] for name, items in state.items()}

    def distribute(self, checkpoint: Checkpoint | None, state: Mapping[str, list[Tensor]]) -> None:
        """Fill the slices of each rank from rank 0's checkpoint (None elsewhere). Every rank must call it."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a strategy makes of a model: its layout, the network to call (maybe wrapped), and its gradient averaging."""

    layout: Layout
    network: nn.Module
    gradient_sync: GradientSync


def build(config: TrainConfig, model: nn.Module, context: RankContext, precision: str) -> Strategy:
    """Distribute the model over the ranks; every rank must call it. Raises ConfigError, TrainerError."""
    strategy: Strategy = options.module("strategy", config.strategy.name).build(config, model, context, precision)
    return strategy


def on_cpu(value: Tensor) -> Tensor:
    """Return a copy on the CPU in the same memory layout. The checkpoint writer's thread makes it contiguous later."""
    return value.detach().to("cpu", copy=True)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [item for item in model.parameters() if item.requires_grad]


def named_trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: item for name, item in model.named_parameters() if item.requires_grad}


def refuse_missing(parameters: Mapping[str, Tensor]) -> None:
    """Raise TrainerError naming the first parameter that has no gradient."""
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    if missing:
        more = f" (nor did {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise TrainerError(
            f"{missing[0]} took no part in the loss{more}; use it in forward, remove it, or freeze it with "
            "requires_grad_(False)"
        )
