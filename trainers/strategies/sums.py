"""Communication hooks of DistributedDataParallel that sum gradients over ranks in ways of our own; ``ddp`` uses them.

``ordered_sum_hook`` (trainer.shards) adds in the order of ``rank_state.pairwise_sum``, whatever the number of ranks. A
rank adds up its own parts as they are computed. Then it sends every other rank a slice of its sum, adds the slices that
it receives, and gathers the finished slices: as many bytes as a ring all-reduce (Thakur, Rabenseifner, Gropp:
Optimization of collective communication operations in MPICH, 2005), in an order that does not depend on buckets.

``shared_memory_hook`` is for two CPU ranks of one host. A sum of two numbers has only one order, so it has gloo's bits:
for 1.6 million parameters in 1.6 ms a step instead of 6.1 ms (benchmarks/training.py's small network)."""
# No ``from __future__ import annotations``: DistributedDataParallel compares a hook's annotations with its own types.

import io
import mmap
import os
import select
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional

from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import pairwise_sum
from trainers.strategies import GradientSync, refuse_missing

_RANKS = 2
_DESCRIPTORS = 5  # the memory, and both ends of two pipes
_TIMEOUT_MS = 600_000  # the timeout of a collective
_ENDED = "connection closed by peer: the other rank of this host has ended"


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Memory of two ranks, and two pipes for their barrier (``meet``)."""

    values: Tensor  # float32 [n], with room for all gradients
    rank: int
    outgoing: io.FileIO
    incoming: io.FileIO

    def meet(self) -> None:
        """Wait until both ranks have called this. Raises ConnectionError, TimeoutError (10 minutes)."""
        with suppress(BrokenPipeError):  # the other rank may have written before it ended: read that first
            self.outgoing.write(b".")
        if not self.incoming.read(1):  # None: nothing written yet; b"": the writer has ended
            poll = select.poll()
            poll.register(self.incoming, select.POLLIN)
            if not poll.poll(_TIMEOUT_MS):
                raise TimeoutError(f"timed out: the other rank of this host is silent for {_TIMEOUT_MS // 1000} s")
            if not self.incoming.read(1):
                raise ConnectionError(_ENDED)


@dataclass(kw_only=True)
class SharedSum:
    """State of ``shared_memory_hook``: this step's buckets so far, each in two halves."""

    memory: SharedMemory
    factor: float = 0.5  # for the mean; 1.0 for the sum
    # (half of a bucket, its place in the memory): the other rank adds up the given halves, this rank the added ones
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    futures: list[tuple[Future[Tensor], Tensor]] = field(default_factory=list)  # (future of a bucket, the bucket)
    filled: int = 0  # elements of the memory in use


def shared_memory_hook(state: SharedSum, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average (or sum) over two ranks after a step's last bucket, bit for bit as an all-reduce. Raises OSError."""
    if bucket.index() == 0:
        state.given, state.added, state.futures, state.filled = [], [], [], 0
    own = bucket.buffer()
    shared = state.memory.values[state.filled : state.filled + own.numel()]
    state.filled += own.numel()
    middle = own.numel() // 2  # rank 0 gives the first half of each bucket, rank 1 the second one
    halves = [(own[:middle], shared[:middle]), (own[middle:], shared[middle:])]
    given, added = halves if state.memory.rank == 0 else halves[::-1]
    torch.mul(given[0], state.factor, out=given[1])
    added[0].mul_(state.factor)
    state.given.append(given)
    state.added.append(added)
    future: Future[Tensor] = Future()
    state.futures.append((future, own))
    if bucket.is_last():
        _add_up(state)
    return future


def _add_up(state: SharedSum) -> None:
    """Add up this rank's half of the gradients for both ranks, and take over the sums of the other half."""
    state.memory.meet()  # now the other rank has written the half that it gives
    for own, shared in state.added:
        shared.copy_(own.add_(shared))
    state.memory.meet()  # now the other rank has written its sums
    for own, shared in state.given:
        own.copy_(shared)
    # no further barrier: in the next step this rank writes first where it alone has read after the last one
    for future, value in state.futures:
        future.set_result(value)


def share_memory(numel: int, context: RankContext) -> SharedMemory | None:
    """Set up memory for ``numel`` gradients of two CPU ranks of one host: a memfd of rank 0, opened through /proc.
    Returns None for other ranks, and if the memory can't be made or opened. Every rank must call it.
    """
    ranks = context.ranks
    both_here = ranks.world_size == ranks.local_world_size == _RANKS
    if not both_here or context.device.type != "cpu" or sys.platform != "linux":
        return None
    size_bytes = 4 * numel
    created = _create(size_bytes) if context.is_rank_zero else []
    # tell the other rank where to open them: rank 0's process id (0: failed), and its descriptors
    numbers = torch.zeros(1 + _DESCRIPTORS, dtype=torch.int64)
    if created:
        numbers.copy_(torch.tensor([os.getpid(), *created]))
    context.broadcast([numbers])
    process, *descriptors = numbers.tolist()
    memory = _open(process, descriptors, size_bytes, rank=ranks.rank) if process else None
    opened = context.sum(torch.tensor(float(memory is not None)))  # also a barrier: both have opened it
    for descriptor in created:
        os.close(descriptor)
    return memory if opened.item() == _RANKS else None


def _create(size_bytes: int) -> list[int]:
    """Create the memory and two pipes; return [memory, reader, writer, reader, writer], or [] if memory is short."""
    descriptors = [os.memfd_create("paceline-gradients"), *os.pipe(), *os.pipe()]
    try:
        # allocate now: a later page fault without free memory would kill the process
        os.posix_fallocate(descriptors[0], 0, size_bytes)
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        return []
    return descriptors


def _open(process: int, descriptors: Sequence[int], size_bytes: int, *, rank: int) -> SharedMemory | None:
    """Open the memory, and this rank's ends of the pipes alone, so that they close when it dies. ``process``,
    ``descriptors``: of rank 0. Rank 0 writes to the first pipe.
    """
    memory, *ends = (Path(f"/proc/{process}/fd/{number}") for number in descriptors)
    incoming, outgoing = (ends[2], ends[1]) if rank == 0 else (ends[0], ends[3])
    try:
        with memory.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), size_bytes)
        reader = io.FileIO(os.open(incoming, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        writer = io.FileIO(os.open(outgoing, os.O_WRONLY | os.O_CLOEXEC), "w")
    except (OSError, ValueError):  # another process namespace, or /proc is hidden
        return None
    values = torch.frombuffer(mapped, dtype=torch.float32)
    return SharedMemory(values=values, rank=rank, outgoing=writer, incoming=reader)


class EarlierParts:
    """The pairwise sum of all parts of a rank but the last, as at most log2(n) + 1 partial sums for n parts."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._index_of = {parameter: index for index, parameter in enumerate(parameters.values())}
        self._sums: list[tuple[int, list[Tensor]]] = []  # (number of parts, sum of their gradients)

    def forget(self) -> None:
        """Begin another step."""
        self._sums = []

    def take(self) -> None:
        """Move a finished part's gradients into the sum. Raises TrainerError: a parameter took no part in the loss."""
        refuse_missing(self._parameters)
        gradients, count = [cast(Tensor, parameter.grad) for parameter in self._parameters.values()], 1
        # two sums of equally many parts become one, as carries in a binary counter
        while self._sums and self._sums[-1][0] == count:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, gradients)
            gradients, count = earlier, 2 * count
        self._sums.append((count, gradients))
        for parameter in self._parameters.values():
            parameter.grad = None

    def add_to(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        """Add the sum to the last part's gradients of some parameters, in place."""
        indices = [self._index_of[parameter] for parameter in parameters]
        for _, earlier in reversed(self._sums):
            torch._foreach_add_(gradients, [earlier[index] for index in indices])


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
        super().finish()
        parameters = [*self._parameters.values()]
        self._earlier.add_to([cast(Tensor, parameter.grad) for parameter in parameters], parameters)


@dataclass(kw_only=True)
class _Exchange:
    """A bucket whose slices are exchanged between the ranks."""

    bucket: Tensor
    whole: Tensor  # the bucket, padded to a multiple of the world size
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
    """State of ``ordered_sum_hook``. ``shared`` replaces the exchange for two CPU ranks of one host."""

    earlier: EarlierParts
    world_size: int
    shared: SharedSum | None = None
    under_way: list[_Exchange] = field(default_factory=list)


def ordered_sum_hook(state: OrderedSum, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over all parts of all ranks: a communication hook of DistributedDataParallel.

    Ranks must start collectives in the same order, so a bucket's slices are added up when the next one is full.
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
