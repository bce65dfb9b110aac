"""Timing one collective: lined-up starts, the slowest rank's time, and a sum that must come out exactly.

Bandwidths as in nccl-tests (doc/PERFORMANCE.md there): algorithm = bytes ÷ time, and for an all-reduce
bus = algorithm × 2(n−1)/n, which is what the slowest link carries whatever the number of ranks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FLOAT_BYTES = 4
_LONGEST_SIZE_S = 10.0  # time spent on one size; fewer measurements where the network is slow
_FEWEST = 3
_SMALL_BYTES = 1 << 16  # below, one call is no longer than the scatter of the ranks' starts:
_SMALL_CALLS = 20  # so many of them in a row make one measurement
_PERIOD = 7
_BLOCK = _PERIOD << 17  # elements that are filled and compared at a time


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One message size. Times in seconds of one call on its slowest rank; ``n`` measurements of ``calls`` calls."""

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
        """All fields and both bandwidths."""
        return {
            **self.__dict__,
            "algorithm_bytes_per_s": self.algorithm_bytes_per_s,
            "bus_bytes_per_s": self.bus_bytes_per_s,
        }


def measure(size_bytes: int, *, device: torch.device, iterations: int, group: dist.ProcessGroup | None) -> Timing:
    """Time all-reduces of ``size_bytes`` (float32, in place) over a group (None: all ranks), then check one.

    Every rank of the group calls it with the same arguments and gets the same result.
    """
    buffer = torch.zeros(size_bytes // FLOAT_BYTES, device=device)
    calls = _SMALL_CALLS if size_bytes <= _SMALL_BYTES else 1
    _call(buffer, calls, group)  # connections and buffers are made by the first one
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
    """Element i becomes ``factor × (i mod 7 + 1)``: sums over ranks stay whole numbers that float32 holds."""
    pattern = factor * (torch.arange(_BLOCK, device=buffer.device) % _PERIOD + 1).to(buffer.dtype)
    for part in torch.split(buffer, _BLOCK):
        part.copy_(pattern[: part.numel()])


def count_wrong(buffer: Tensor, factor: int) -> int:
    """How many elements are not what ``fill`` with that factor would have made them."""
    expected = torch.empty(min(_BLOCK, buffer.numel()), device=buffer.device, dtype=buffer.dtype)
    fill(expected, factor)
    parts = torch.split(buffer, _BLOCK)
    return sum(int((part != expected[: part.numel()]).sum()) for part in parts)


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call(buffer: Tensor, calls: int, group: dist.ProcessGroup | None) -> float:
    """Seconds of one call on this rank, from a common start."""
    dist.all_reduce(torch.zeros(1, device=buffer.device), group=group)
    settle(buffer.device)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(buffer, group=group)
    settle(buffer.device)
    return (time.perf_counter() - began) / calls


def _slowest(times_s: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Of each measurement the slowest rank's time."""
    both = torch.tensor(times_s, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    slowest: list[float] = both.tolist()
    return slowest


def _check(buffer: Tensor, group: dist.ProcessGroup | None) -> int:
    """Wrong elements of one all-reduce, over all ranks of the group."""
    ranks = dist.get_world_size(group)
    fill(buffer, dist.get_rank(group) + 1)
    dist.all_reduce(buffer, group=group)
    wrong = torch.tensor([count_wrong(buffer, ranks * (ranks + 1) // 2)], device=buffer.device)
    dist.all_reduce(wrong, group=group)
    return int(wrong)
