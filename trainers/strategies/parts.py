"""Sum the gradients of a global batch's parts in one order on any number of ranks (trainer.shards).

The order is that of ``rank_state.pairwise_sum``. A rank adds up its own parts as they are computed. Between
ranks, each sends every other rank a slice of its sum, adds the slices that it receives, and gathers the finished
slices: as many bytes as a ring all-reduce sends (Thakur, Rabenseifner, Gropp: Optimization of collective communication
operations in MPICH, 2005), in an order that does not depend on buckets. A sum of two ranks has only one order.
Annotations are not postponed: DistributedDataParallel compares those of a hook with its own types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional

from trainers.distributed.rank_state import pairwise_sum
from trainers.strategies import GradientSync, refuse_missing
from trainers.strategies.shared_memory import SharedSum, shared_memory_hook


class EarlierParts:
    """The pairwise sum of the gradients of a rank's parts, except for the last part.

    Of n parts it holds at most log2(n) + 1 lists of gradients.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._places = {parameter: place for place, parameter in enumerate(parameters.values())}
        self._sums: list[tuple[int, list[Tensor]]] = []  # partial sums with their number of parts: 4, 2, 1

    def forget(self) -> None:
        """Begin a new step."""
        self._sums = []

    def take(self) -> None:
        """Move the gradients of a finished part from the parameters into the sum.

        Raises:
            TrainerError: a parameter took no part in the loss.
        """
        refuse_missing(self._parameters)
        gradients, count = [cast(Tensor, parameter.grad) for parameter in self._parameters.values()], 1
        while self._sums and self._sums[-1][0] == count:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, gradients)
            gradients, count = earlier, 2 * count
        self._sums.append((count, gradients))
        for parameter in self._parameters.values():
            parameter.grad = None

    def add_to(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        """Add the sum to the last part's gradients of some parameters, in place."""
        places = [self._places[parameter] for parameter in parameters]
        for _, earlier in reversed(self._sums):
            torch._foreach_add_(gradients, [earlier[place] for place in places])


class PartGradients(GradientSync):
    """Gradients of several parts on a single rank."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._earlier = EarlierParts(parameters)

    def start(self) -> None:
        super().start()
        self._earlier.forget()

    def next_part(self) -> None:
        self._earlier.take()

    def finish(self) -> None:
        """Raises TrainerError naming a parameter that took no part in the loss."""
        super().finish()
        parameters = [*self._parameters.values()]
        self._earlier.add_to([cast(Tensor, parameter.grad) for parameter in parameters], parameters)


@dataclass(kw_only=True)
class _Exchange:
    """A bucket in transit. ``whole`` is the bucket, padded to a multiple of the world size."""

    bucket: Tensor
    whole: Tensor
    slices: Tensor  # [world_size, n]: this rank's slice of each rank's sum
    work: dist.Work
    future: Future[Tensor]

    def add_up(self) -> None:
        """Wait for the slices, add them, and start to gather the sums of all slices."""
        self.work.wait()
        total = pairwise_sum(self.slices)
        self.work = _started(dist.all_gather_into_tensor(self.whole, total, async_op=True))

    def finish(self) -> None:
        self.work.wait()
        if self.whole is not self.bucket:
            self.bucket.copy_(self.whole[: len(self.bucket)])
        self.future.set_result(self.bucket)


@dataclass(kw_only=True)
class OrderedSum:
    """State of ``ordered_sum_hook``. ``shared`` replaces the exchange for two ranks of one host."""

    earlier: EarlierParts
    world_size: int
    shared: SharedSum | None = None
    under_way: list[_Exchange] = field(default_factory=list)


def ordered_sum_hook(state: OrderedSum, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over all parts of all ranks, as a communication hook of DistributedDataParallel.

    gloo and nccl match collectives by their order, so every rank must start them in the same order. Therefore nothing
    is started from a callback: a bucket's slices travel while the next bucket fills, and are then added up.
    """
    parameters = bucket.parameters()
    pairs = zip(bucket.gradients(), parameters, strict=True)
    # gradients() returns contiguous views, but each gradient is stored with its parameter's strides (channels last)
    gradients = [gradient.as_strided(parameter.size(), parameter.stride()) for gradient, parameter in pairs]
    state.earlier.add_to(gradients, parameters)
    if state.shared is not None:
        return shared_memory_hook(state.shared, bucket)
    if bucket.index() == 0:
        state.under_way.clear()
    state.under_way.append(_start(bucket.buffer(), state.world_size))
    if len(state.under_way) > 1:
        state.under_way[-2].add_up()
    future = state.under_way[-1].future
    if bucket.is_last():
        state.under_way[-1].add_up()
        for exchange in state.under_way:
            exchange.finish()
        state.under_way.clear()
    return future


def _start(bucket: Tensor, world_size: int) -> _Exchange:
    missing = -len(bucket) % world_size
    whole = functional.pad(bucket, (0, missing)) if missing else bucket
    slices = torch.empty_like(whole)
    work = _started(dist.all_to_all_single(slices, whole, async_op=True))
    future: Future[Tensor] = Future(devices=[bucket.device] if bucket.device.type == "cuda" else None)
    return _Exchange(bucket=bucket, whole=whole, slices=slices.view(world_size, -1), work=work, future=future)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "None is for a rank outside of the group"
    return work
