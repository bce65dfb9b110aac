"""The measurement of hosts: the speed of matrix products on each rank, and of all-reduces within each node and between
each pair of nodes.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): algorithm = bytes ÷ time; bus = algorithm × 2(n−1)/n."""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.core.files import write_json
from trainers.distributed.node_hardware import device_name
from trainers.distributed.process_group import RankContext, connect
from trainers.distributed.ranks import read_ranks
from trainers.distributed.resources import take_cores

_SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices: large enough for the full speed of a training
_MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_SAMPLES = 10
_SAMPLE_S = 0.05  # shortest duration of a sample


def run(backend: str, output: Path, *, side: int | None = None, size_bytes: int | None = None) -> None:
    """Measure and report; every rank must call it. ``side``: of the matrices. Raises TrainerError."""
    take_cores(read_ranks())
    with connect(backend) as context:
        infos = gather_rank_infos(context)
        side, size_bytes = side or _SIDE[context.device.type], size_bytes or _MESSAGE_BYTES[context.device.type]
        speeds = context.share(multiply_flop_per_s(context.device, side))
        groups = _groups(context, infos, size_bytes)
        if context.is_rank_zero:
            ranks = [{**vars(info), "flop_per_s": speed} for info, speed in zip(infos, speeds, strict=True)]
            write_json(output, {**_surroundings(context), "side": side, "ranks": ranks, "groups": groups})


def multiply_flop_per_s(device: torch.device, side: int) -> float:
    """Return the median FLOP/s of this rank for products of square matrices: bf16 on a GPU, else float32."""
    left = torch.ones(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    into = torch.empty_like(left)

    def seconds(products: int) -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(products):
            torch.matmul(left, left, out=into)
        settle(device)
        return (time.perf_counter() - began) / products

    seconds(2)  # warm up libraries and clocks
    products = max(1, round(_SAMPLE_S / seconds(1)))
    return 2.0 * side**3 / statistics.median(seconds(products) for _ in range(_SAMPLES))


def _groups(context: RankContext, infos: Sequence[RankInfo], size_bytes: int) -> list[dict[str, Any]]:
    """Return the timings of all groups: each node with several ranks, then each pair of nodes."""
    nodes = sorted({info.node_rank for info in infos})
    node_of_rank = [info.node_rank for info in infos]
    groups: list[tuple[int, ...]] = [(number,) for number in nodes if node_of_rank.count(number) > 1]
    groups += itertools.combinations(nodes, 2)
    return [
        {"nodes": list(group), **measure_nodes(context, infos, group, size_bytes, _SAMPLES).as_json()}
        for group in groups
    ]


def _surroundings(context: RankContext) -> dict[str, Any]:
    cuda = context.device.type == "cuda"
    return {
        "version": 1,
        "unix_time": time.time(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "backend": context.backend,
        "device": context.device.type,
    }


FLOAT_BYTES = 4
_LONGEST_SIZE_S = 10.0  # time spent on one size; fewer measurements where the network is slow
_FEWEST = 3
_SMALL_BYTES = 1 << 16  # up to this size, a call is as short as the spread of the ranks' start times,
_SMALL_CALLS = 20  # so a measurement consists of this many calls
_PERIOD = 7  # of the numbers in a buffer (``fill``)
_BLOCK = _PERIOD << 17  # elements filled and compared at a time


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    rank: int
    node_rank: int
    host: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """All-reduces of one size: ``n`` measurements of ``calls`` calls each. ``min_s``, …: seconds of one call."""

    size_bytes: int
    ranks: int
    n: int
    calls: int
    min_s: float
    median_s: float
    max_s: float
    wrong_elements: int

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.size_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        return self.algorithm_bytes_per_s * 2 * (self.ranks - 1) / self.ranks

    def as_json(self) -> dict[str, float]:
        return {
            **self.__dict__,
            "algorithm_bytes_per_s": self.algorithm_bytes_per_s,
            "bus_bytes_per_s": self.bus_bytes_per_s,
        }


def gather_rank_infos(context: RankContext) -> list[RankInfo]:
    """Exchange the identities of all ranks."""
    ranks = context.ranks
    device = f"{context.device} {device_name(context.device)}"
    mine = RankInfo(rank=ranks.rank, node_rank=ranks.node_rank, host=socket.gethostname(), device=device)
    return [RankInfo(**content) for content in context.share(vars(mine))]


def measure_nodes(
    context: RankContext, infos: Sequence[RankInfo], nodes: Sequence[int], size_bytes: int, iterations: int
) -> Timing:
    """Time all-reduces of the ranks of ``nodes`` while the others wait; every rank calls it, and gets the result."""
    members = [info.rank for info in infos if info.node_rank in nodes]
    group = dist.new_group(members)
    timing: Timing | None = None
    if isinstance(group, dist.ProcessGroup) and context.ranks.rank in members:
        timing = measure(size_bytes, device=context.device, iterations=iterations, group=group)
        dist.destroy_process_group(group)
    # ranks outside of the group wait here, so only one pair uses the network at a time
    return Timing(**context.share(vars(timing) if timing else {})[members[0]])


def measure(size_bytes: int, *, device: torch.device, iterations: int, group: dist.ProcessGroup | None) -> Timing:
    """Time all-reduces of ``size_bytes`` of float32 over a group, and check the sums of one."""
    buffer = torch.zeros(size_bytes // FLOAT_BYTES, device=device)
    calls = _SMALL_CALLS if size_bytes <= _SMALL_BYTES else 1
    _call(buffer, calls, group)  # the first call creates connections and buffers
    estimate = _slowest([_call(buffer, calls, group)], device, group)[0]
    n = max(min(iterations, _FEWEST), min(iterations, int(_LONGEST_SIZE_S / (estimate * calls))))
    times = _slowest([_call(buffer, calls, group) for _ in range(n)], device, group)
    return Timing(
        size_bytes=buffer.nbytes,
        ranks=dist.get_world_size(group),
        n=n,
        calls=calls,
        min_s=min(times),
        median_s=statistics.median(times),
        max_s=max(times),
        wrong_elements=_check(buffer, group),
    )


def fill(buffer: Tensor, factor: int) -> None:
    """Set element i to ``factor × (i mod 7 + 1)``: sums over ranks are integers that float32 represents exactly."""
    pattern = factor * (torch.arange(_BLOCK, device=buffer.device) % _PERIOD + 1).to(buffer.dtype)
    for part in torch.split(buffer, _BLOCK):
        part.copy_(pattern[: part.numel()])


def count_wrong(buffer: Tensor, factor: int) -> int:
    expected = torch.empty(min(_BLOCK, buffer.numel()), device=buffer.device, dtype=buffer.dtype)
    fill(expected, factor)
    parts = torch.split(buffer, _BLOCK)
    return sum(int((part != expected[: part.numel()]).sum()) for part in parts)


def settle(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call(buffer: Tensor, calls: int, group: dist.ProcessGroup | None) -> float:
    """Return the seconds of one call on this rank, after a common start."""
    dist.all_reduce(torch.zeros(1, device=buffer.device), group=group)
    settle(buffer.device)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(buffer, group=group)
    settle(buffer.device)
    return (time.perf_counter() - began) / calls


def _slowest(times_s: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Return each time as the slowest rank measured it."""
    times = torch.tensor(times_s, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    slowest: list[float] = times.tolist()
    return slowest


def _check(buffer: Tensor, group: dist.ProcessGroup | None) -> int:
    """Count the wrong elements of one all-reduce, over all ranks of the group."""
    ranks = dist.get_world_size(group)
    fill(buffer, dist.get_rank(group) + 1)
    dist.all_reduce(buffer, group=group)
    wrong = torch.tensor([count_wrong(buffer, ranks * (ranks + 1) // 2)], device=buffer.device)
    dist.all_reduce(wrong, group=group)
    return int(wrong)
