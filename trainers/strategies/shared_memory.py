"""Memory that the two ranks of one host share: their gradients meet there instead of in gloo's sockets.

For 1.6 million parameters that is 1.6 ms a step instead of 6.1 ms (benchmarks/training.py's small network). Two
ranks only: a sum of two has one order, so it is bit for bit the sum that gloo makes, wherever this can't be had.
The ranks tell each other through pipes how far they are; a pipe ends when its writer dies, so that is noticed at once.
Annotations are not postponed: DistributedDataParallel compares those of a hook with its own types.
"""

import io
import mmap
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from trainers.distributed.process_group import Node

_RANKS = 2
_DESCRIPTORS = 5  # of the memory, and of both ends of two pipes
_TIMEOUT_MS = 600_000  # as long as a collective may take
_ENDED = "connection closed by peer: the other rank of this host has ended"


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """``values`` has shape [n], float32.

    A rank writes its half; they meet; it adds to the other's half; they meet; it reads its own. So each writes next
    where the other has long read, and half the memory does that two full sets would take.
    """

    values: Tensor
    rank: int
    outgoing: io.FileIO
    incoming: io.FileIO

    def meet(self) -> None:
        """Tell that all is written, and wait until the other rank has told that too.

        Raises:
            ConnectionError: the other rank has ended.
            TimeoutError: ten minutes have passed.
        """
        with suppress(BrokenPipeError):  # what it told before it ended is still to be heard
            self.outgoing.write(b".")
        if not self.incoming.read(1):  # None where there is nothing yet, b"" at the end
            poll = select.poll()
            poll.register(self.incoming, select.POLLIN)
            if not poll.poll(_TIMEOUT_MS):
                raise TimeoutError(f"timed out: the other rank of this host is silent for {_TIMEOUT_MS // 1000} s")
            if not self.incoming.read(1):
                raise ConnectionError(_ENDED)


@dataclass(kw_only=True)
class SharedSum:
    """State of ``shared_memory_hook``: the buckets of this step that have arrived, each with what it will hold.

    ``factor``: 0.5 for the mean over the two ranks, 1.0 for their sum.
    """

    memory: SharedMemory
    factor: float = 0.5
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # a half of a bucket, its place in the memory
    taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    futures: list[tuple[Future[Tensor], Tensor]] = field(default_factory=list)
    filled: int = 0  # elements of the memory


def shared_memory_hook(state: SharedSum, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean (or sum) over two ranks, bit for bit what an all-reduce makes of the halved (or whole) gradients.

    Each rank gives half of a bucket as soon as it is full. After the last bucket they meet, each adds its own to what
    the other has given, they meet again, and each reads the sums of what it gave.

    Raises:
        ConnectionError, TimeoutError: the other rank has ended, or is silent.
    """
    if bucket.index() == 0:
        state.given, state.taken, state.futures, state.filled = [], [], [], 0
    own = bucket.buffer()
    shared = state.memory.values[state.filled : state.filled + own.numel()]
    state.filled += own.numel()
    middle = own.numel() // 2
    halves = [(own[:middle], shared[:middle]), (own[middle:], shared[middle:])]
    given, taken = halves if state.memory.rank == 0 else halves[::-1]
    torch.mul(given[0], state.factor, out=given[1])
    taken[0].mul_(state.factor)
    state.given.append(given)
    state.taken.append(taken)
    future: Future[Tensor] = Future()
    state.futures.append((future, own))
    if bucket.is_last():
        _add_up(state)
    return future


def _add_up(state: SharedSum) -> None:
    state.memory.meet()
    for own, shared in state.taken:
        shared.copy_(own.add_(shared))
    state.memory.meet()
    for own, shared in state.given:
        own.copy_(shared)
    for future, value in state.futures:
        future.set_result(value)


def share_memory(numel: int, node: Node) -> SharedMemory | None:
    """Memory for ``numel`` elements, or None on all ranks where there are not just two on one host.

    A memfd of rank 0 and two pipes, which the other opens through /proc: no file is left behind, and /dev/shm may be
    small.
    """
    ranks = node.ranks
    both_here = ranks.world_size == ranks.local_world_size == _RANKS
    if not both_here or node.device.type != "cpu" or sys.platform != "linux":
        return None
    size = 4 * numel
    made = _make(size) if node.is_rank_zero else []
    place = torch.zeros(1 + _DESCRIPTORS, dtype=torch.int64)  # process of rank 0 (0 where it failed), its descriptors
    if made:
        place.copy_(torch.tensor([os.getpid(), *made]))
    node.broadcast([place])
    process, *theirs = place.tolist()
    memory = _open(process, theirs, size, rank=ranks.rank) if process else None
    opened = node.sum(torch.tensor(float(memory is not None)))  # also: both have it open
    for descriptor in made:
        os.close(descriptor)
    return memory if opened.item() == _RANKS else None


def _make(size: int) -> list[int]:
    """The memory and both ends of two pipes, or nothing. Memory that can't be had later would end the process."""
    descriptors = [os.memfd_create("paceline-gradients"), *os.pipe(), *os.pipe()]
    try:
        os.posix_fallocate(descriptors[0], 0, size)
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        return []
    return descriptors


def _open(process: int, descriptors: Sequence[int], size: int, *, rank: int) -> SharedMemory | None:
    """Each rank opens its own ends only, so that an end closes when its rank dies. Rank 0 writes the first pipe."""
    memory, *ends = (Path(f"/proc/{process}/fd/{number}") for number in descriptors)
    incoming, outgoing = (ends[2], ends[1]) if rank == 0 else (ends[0], ends[3])
    try:
        with memory.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), size)
        reader = io.FileIO(os.open(incoming, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        writer = io.FileIO(os.open(outgoing, os.O_WRONLY | os.O_CLOEXEC), "w")
    except (OSError, ValueError):  # another process namespace, or /proc is hidden
        return None
    values = torch.frombuffer(mapped, dtype=torch.float32)
    return SharedMemory(values=values, rank=rank, outgoing=writer, incoming=reader)
