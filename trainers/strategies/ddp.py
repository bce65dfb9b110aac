"""Data parallelism with torch's DistributedDataParallel, which averages gradients during the backward pass.

Li et al.: PyTorch Distributed, VLDB 2020. A single rank runs without it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainers.core.config import ConfigError, StrategyConfig, TrainConfig, TrainerConfig, choice
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.strategies import GradientSync, Layout, Strategy, named_trainable, trainable
from trainers.strategies.sums import (
    EarlierParts,
    OrderedSum,
    PartGradients,
    SharedMemory,
    SharedSum,
    ordered_sum_hook,
    share_memory,
    shared_memory_hook,
)

_WARM_UP_PASSES = 3
"""With a static graph, the first pass counts gradients, the second finds their order, and the third uses the final
buckets, as all later ones do. The bits of a sum over more than two ranks depend on the buckets."""
_SAME_LAYERS = "with more than one rank a network must use the same layers in every step, as often as in its first pass"
_SAME_NETWORK = "the network must have the same parameters on every rank"
_EXPLAINED = {  # part of a message of DistributedDataParallel → its meaning for the user
    "Your training graph has changed": _SAME_LAYERS,
    "Expected to have finished reduction": _SAME_LAYERS,
    "appears not to match": _SAME_NETWORK,
    "expects same model": _SAME_NETWORK,
    "doesn't have any parameter that requires": "the network has no parameter that is to be trained",
}


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """Every rank has the whole model.

    Attributes:
        compression: fp16 and bf16 send gradients in half the bytes, rounded to 11 and 8 bits, for links that are slower
            than the backward pass; none sends them as they are.
    """

    name: str = "ddp"
    compression: str = "none"

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        choice("strategy.compression", self.compression, ("none", "fp16", "bf16"))
        if self.compression == "bf16" and self.backend == "gloo":
            raise ConfigError(
                f"strategy.compression=bf16 needs the backend nccl, and this is strategy.backend={self.backend}; "
                "choose strategy.compression=fp16"
            )


class ReplicatedGradients(GradientSync):
    """Gradients that DistributedDataParallel combines over the ranks during the backward pass: their mean, or with
    trainer.shards the sum over all parts.

    With shards a rank computes several parts of the batch one after another; ``earlier`` then holds the sum of all of
    them except the last (None: no shards).
    """

    warm_up_passes = _WARM_UP_PASSES

    def __init__(self, model: nn.Module, network: DistributedDataParallel, earlier: EarlierParts | None = None) -> None:
        super().__init__(named_trainable(model))
        self._network, self._earlier = network, earlier

    def start(self) -> None:
        super().start()
        if self._earlier is not None:
            self._earlier.forget()

    def next_part(self) -> None:
        if self._earlier is not None:
            self._earlier.take()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with _explained(), nullcontext() if last else self._network.no_sync():
            yield


def build(config: TrainConfig, model: nn.Module, context: RankContext, precision: str) -> Strategy:
    ddp = config.strategy
    assert isinstance(ddp, DDPConfig)
    if ddp.compression == "bf16" and context.ranks.world_size > 1 and context.backend != "nccl":
        raise TrainerError(
            f"strategy.compression=bf16 needs the backend nccl, and this run has {context.backend}; "
            "choose strategy.compression=fp16"
        )
    layout, network = Layout(model, context), model
    if config.trainer.compile:
        network = _compiled(model, config.trainer)
    if context.ranks.world_size == 1:
        local = PartGradients if config.trainer.shards else GradientSync
        return Strategy(layout=layout, network=network, gradient_sync=local(named_trainable(model)))
    replicated = _replicated(network)
    if config.trainer.shards:
        earlier = _add_in_order(replicated, model, context)
    else:
        earlier = None
        _register_hook(replicated, trainable(model), ddp, context)
    sync = ReplicatedGradients(model, replicated, earlier)
    return Strategy(layout=layout, network=replicated, gradient_sync=sync)


def _compiled(model: nn.Module, config: TrainerConfig) -> nn.Module:
    """Compile the network on its first call; as torch advises, DistributedDataParallel around it is not compiled."""
    compiled: nn.Module = torch.compile(model, dynamic=False, mode=config.compile_mode)  # type: ignore[assignment]
    return compiled


def _replicated(network: nn.Module) -> DistributedDataParallel:
    """Wrap the network. Raises TrainerError if the ranks' networks differ, or there is nothing to train."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"  # before 2.13
    # each rank keeps batch statistics of its own; an evaluation makes them equal
    no_buffer_sync: dict[str, Any] = {buffers: False}
    with _explained():
        return DistributedDataParallel(network, static_graph=True, gradient_as_bucket_view=True, **no_buffer_sync)


def _register_hook(
    network: DistributedDataParallel, parameters: list[nn.Parameter], config: DDPConfig, context: RankContext
) -> None:
    """Register the communication hook: compression if configured, or shared memory for two ranks of one host."""
    if config.compression != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        network.register_comm_hook(None, hooks[config.compression])
    elif (memory := _shared_memory(parameters, context)) is not None:
        network.register_comm_hook(SharedSum(memory=memory), shared_memory_hook)


def _add_in_order(network: DistributedDataParallel, model: nn.Module, context: RankContext) -> EarlierParts:
    """Register the hook that sums trainer.shards' parts in order; return the sum of earlier parts, to be filled."""
    earlier, memory = EarlierParts(named_trainable(model)), _shared_memory(trainable(model), context)
    shared = None if memory is None else SharedSum(memory=memory, factor=1.0)
    state = OrderedSum(earlier=earlier, world_size=context.ranks.world_size, shared=shared)
    network.register_comm_hook(state, ordered_sum_hook)
    return earlier


def _shared_memory(parameters: list[nn.Parameter], context: RankContext) -> SharedMemory | None:
    """Return memory for the gradients of two CPU ranks of one host; None for other ranks or kinds of gradients."""
    if any(item.dtype != torch.float32 for item in parameters):
        return None
    return share_memory(sum(item.numel() for item in parameters), context)


@contextmanager
def _explained() -> Iterator[None]:
    """Convert messages of DistributedDataParallel that a user can do something about into TrainerErrors."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        for part, meaning in _EXPLAINED.items():
            if part in text:
                first_line = text.partition("\n")[0]
                raise TrainerError(f"{meaning}; torch says: {first_line}") from error
        raise
