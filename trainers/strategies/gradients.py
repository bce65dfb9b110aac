"""Data-parallel gradients: averaged over the ranks in buckets, while the backward pass still runs.

The same scheme as torch's DistributedDataParallel with gradient_as_bucket_view and a static graph
(Li et al.: PyTorch Distributed, VLDB 2020). Written out because that class imports torch._dynamo when it is
constructed: 2 to 8 seconds on every rank before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.core.errors import TrainerError
from trainers.strategies import refuse_missing
from trainers.strategies.powersgd import LowRank, split
from trainers.strategies.shared_memory import SharedMemory

if TYPE_CHECKING:  # that module imports this one
    from trainers.strategies.ddp import DDPConfig

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early
_SENT_AS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class _Bucket:
    """Some parameters and one flat buffer for their gradients; ``views`` are that buffer in their shapes.

    ``sent`` is what travels: the buffer itself, its copy in fewer bits, or what ``low_rank`` makes of it. Over shared
    memory nothing does: ``given`` and ``taken`` are halves of the buffer, each with its place there.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    sent: Tensor
    low_rank: LowRank | None = None
    given: tuple[Tensor, Tensor] | None = None
    taken: tuple[Tensor, Tensor] | None = None
    waiting: int = 0
    work: dist.Work | None = field(default=None, repr=False)


class GradientAverager:
    """Averages gradients over the ranks.

    ``start()``, any number of backward passes of losses divided by their number over all ranks, ``send_next()``
    before the last of them, ``finish()``: then every ``.grad`` holds the mean. With one rank it only clears gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world_size: int,
        config: DDPConfig,
        memory: SharedMemory | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """``config``: compression on the wire (the sum is taken in that too). ``memory``: instead of a wire.
        ``names`` of the parameters, for messages."""
        self._config = config
        self._parameters = list(parameters)
        self._names = list(names) or [f"parameter {index}" for index in range(len(self._parameters))]
        self._memory = memory
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._sends = False
        self._low_rank = False
        self._arrivals = [0] * len(self._parameters)  # of each parameter, in the last backward pass of this step
        self._expected: list[int] | None = None  # as many as in the first step; until it has ended, nobody knows
        if world_size > 1:
            index = {parameter: place for place, parameter in enumerate(self._parameters)}
            self._buckets = _fill_buckets(self._parameters, _SENT_AS.get(self._config.compression))
            if memory is not None:
                _lay_into(memory, self._buckets)
            for bucket in self._buckets:
                if self._config.compression == "powersgd":
                    bucket.low_rank = _low_rank(bucket, self._config.powersgd_rank, world_size)
                for parameter in bucket.parameters:
                    hook = partial(self._arrived, bucket, index[parameter])
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def start(self, step: int) -> None:
        """Forget the gradients of the step before; ``step`` counts the steps of the run from 0."""
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
        self._arrivals = [0] * len(self._parameters)
        self._next = 0
        self._sends = False
        self._low_rank = step >= self._config.powersgd_start_step

    def state(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps and all ranks have alike."""
        found = [bucket.low_rank.start for bucket in self._buckets if bucket.low_rank is not None]
        return {"powersgd": found} if found else {}

    def own(self) -> list[Tensor]:
        """What a checkpoint keeps and each rank has of its own: what it hasn't sent yet."""
        return [bucket.low_rank.error for bucket in self._buckets if bucket.low_rank is not None]

    def send_next(self) -> None:
        """The next backward pass is the last of this step: send each bucket as soon as it is full."""
        self._sends = True

    @torch.no_grad()
    def finish(self) -> None:
        """Send what isn't under way yet and wait for the sums. Raises TrainerError naming a parameter that took no
        part in the loss."""
        refuse_missing(dict(zip(self._names, self._parameters, strict=True)))
        if self._expected is None and self._sends:
            self._expected = self._arrivals
        while self._next < len(self._buckets):
            self._send_next_bucket()
        thin = [bucket.low_rank for bucket in self._buckets if bucket.low_rank is not None and self._low_rank]
        for low_rank in thin:
            low_rank.turn()
        for low_rank in thin:
            low_rank.end()
        if self._memory is not None:
            _add_up(self._memory, self._buckets)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
                if bucket.sent is not bucket.flat:
                    bucket.flat.copy_(bucket.sent)

    def _arrived(self, bucket: _Bucket, place: int, _: Tensor) -> None:
        """Send full buckets, always in the same order on every rank.

        A gradient may come in several parts (a layer that is used again, computed anew in the backward pass by
        reentrant checkpointing): it is whole after as many as in the first step.
        """
        if not self._sends:
            return
        self._arrivals[place] += 1
        if self._expected is None:
            return
        if self._arrivals[place] == self._expected[place]:
            bucket.waiting -= 1
        elif self._arrivals[place] > self._expected[place]:
            raise TrainerError(
                f"the gradient of {self._names[place]} came in more than the {self._expected[place]} part(s) of the "
                "first step; a network must use the same layers in every step"
            )
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._send_next_bucket()

    def _send_next_bucket(self) -> None:
        _send(self._buckets[self._next], low_rank=self._low_rank)
        self._next += 1


@torch.no_grad()
def _send(bucket: _Bucket, *, low_rank: bool) -> None:
    gradients = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
    torch._foreach_copy_(bucket.views, gradients)
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        parameter.grad = view
    if bucket.given is not None:
        own, shared = bucket.given
        shared.copy_(own)
        return
    if low_rank and bucket.low_rank is not None:
        bucket.low_rank.begin()
        return
    if bucket.sent is not bucket.flat:
        bucket.sent.copy_(bucket.flat)
    bucket.work = dist.all_reduce(bucket.sent, async_op=True)


def _fill_buckets(parameters: Sequence[nn.Parameter], sent_dtype: torch.dtype | None) -> list[_Bucket]:
    """Last parameters first: their gradients are ready first. A bucket is closed when it has reached its limit."""
    groups: list[list[nn.Parameter]] = [[]]
    limit, filled = _FIRST_BUCKET_BYTES, 0
    for parameter in reversed(parameters):
        if groups[-1] and (filled >= limit or parameter.dtype != groups[-1][-1].dtype):
            groups.append([])
            limit, filled = _BUCKET_BYTES, 0
        groups[-1].append(parameter)
        filled += parameter.nbytes
    return [_bucket(group, sent_dtype) for group in groups if group]


def _bucket(parameters: list[nn.Parameter], sent_dtype: torch.dtype | None) -> _Bucket:
    """Views take the strides of their parameter, so that channels-last gradients are copied in one run."""
    flat = torch.zeros(sum(item.numel() for item in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    sent = flat if sent_dtype is None else torch.zeros_like(flat, dtype=sent_dtype)
    return _Bucket(parameters=parameters, flat=flat, views=_views(flat, parameters), sent=sent)


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of one contiguous buffer, one after the other."""
    views, offset = [], 0
    for item in parameters:
        views.append(flat.view(-1)[offset : offset + item.numel()].as_strided(item.shape, item.stride()))
        offset += item.numel()
    return views


def _lay_into(memory: SharedMemory, buckets: Sequence[_Bucket]) -> None:
    start = 0
    for bucket in buckets:
        stop = start + bucket.flat.numel()
        middle = bucket.flat.numel() // 2
        own, shared = bucket.flat, memory.values[start:stop]
        halves = (own[:middle], shared[:middle]), (own[middle:], shared[middle:])
        bucket.given, bucket.taken = halves if memory.rank == 0 else halves[::-1]
        start = stop


def _add_up(memory: SharedMemory, buckets: Sequence[_Bucket]) -> None:
    """Each rank adds its own to the half that the other has given; then both have the sums."""
    memory.meet()
    for bucket in buckets:
        if bucket.taken is not None:
            own, shared = bucket.taken
            shared.copy_(own.add_(shared))
    memory.meet()
    for bucket in buckets:
        if bucket.given is not None:
            own, shared = bucket.given
            own.copy_(shared)


def _low_rank(bucket: _Bucket, rank: int, world_size: int) -> LowRank:
    """In a matrix a row is an output (its columns lie as they do in memory)."""
    parts = split(bucket.flat, [torch.Size((item.numel(),)) for item in bucket.parameters])
    rows = [item.shape[0] if item.dim() > 1 else item.numel() for item in bucket.parameters]
    return LowRank(parts, rows, rank=rank, world_size=world_size)
