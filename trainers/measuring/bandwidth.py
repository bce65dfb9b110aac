"""Time and check all-reduces: all ranks start together, the slowest rank's time counts, and the sum must be exact.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md there): algorithm = bytes ÷ time, and for an all-reduce
bus = algorithm × 2(n−1)/n, the load of the slowest link whatever the number of ranks.
"""

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

from trainers.core.errors import TrainerError
from trainers.core.files import write_json
from trainers.distributed.connecting import connect
from trainers.distributed.node_info import device_name
from trainers.distributed.process_group import RankContext

_SMALLEST_BYTES = 8
_LARGEST_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}  # on CPUs, 1 GiB takes long and shows no more
_PAIR_BYTES = 16 << 20
_STEP = 4  # factor from one message size to the next
FLOAT_BYTES = 4
_LONGEST_SIZE_S = 10.0  # time spent on one size; fewer measurements where the network is slow
_FEWEST = 3
_SMALL_BYTES = 1 << 16  # up to this size, a call is as short as the spread of the ranks' start times,
_SMALL_CALLS = 20  # so a measurement consists of this many calls
_PERIOD = 7
_BLOCK = _PERIOD << 17  # elements filled and compared at a time
_HEADER = f"{'bytes':>12}{'n':>5}{'min µs':>12}{'median µs':>12}{'max µs':>12}{'alg MB/s':>11}{'bus MB/s':>11}  wrong"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Message sizes in bytes (``max_bytes`` None: the backend's default), and measurements per size."""

    min_bytes: int = _SMALLEST_BYTES
    max_bytes: int | None = None
    iterations: int = 20
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank's identity, as the rank itself reports it."""

    rank: int
    node_rank: int
    host: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Results for one message size: seconds per call on the slowest rank; ``n`` measurements of ``calls`` calls."""

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
        """Return all fields and both bandwidths."""
        return {
            **self.__dict__,
            "algorithm_bytes_per_s": self.algorithm_bytes_per_s,
            "bus_bytes_per_s": self.bus_bytes_per_s,
        }


def run(settings: Settings, output: Path | None) -> None:
    """Measure and report. Every rank must call it.

    Raises:
        TrainerError: there is only one rank, the sizes are invalid, or a sum is wrong.
    """
    with connect(settings.backend) as context:
        if context.ranks.world_size < 2:
            raise TrainerError("an all-reduce needs at least 2 ranks; try cluster.nproc_per_node=2 or a cluster")
        infos = gather_rank_infos(context)
        sizes = message_sizes(settings, context.backend)
        _say(context, [f"rank {info.rank}  node {info.node_rank}  {info.host}  {info.device}" for info in infos])
        rows = _sweep(context, sizes, settings.iterations)
        pairs = _pairs(context, infos, sizes, settings.iterations)
        if context.is_rank_zero and output is not None:
            write_json(output, _result(context, infos, rows, pairs))
        # raise only after the file is written, so that wrong sums can be examined
        wrong = [f"{row.size_bytes} bytes: {row.wrong_elements} elements" for row in rows if row.wrong_elements]
        wrong += [f"{' – '.join(pair['hosts'])}: {pair['wrong_elements']}" for pair in pairs if pair["wrong_elements"]]
        if wrong:
            raise TrainerError(f"all-reduces gave wrong sums ({'; '.join(wrong)}); the network or a device is faulty")


def message_sizes(settings: Settings, backend: str) -> list[int]:
    """Return sizes from the smallest to the largest, each four times the previous one. Raises TrainerError."""
    largest = settings.max_bytes or _LARGEST_BYTES[backend]
    if not 4 <= settings.min_bytes <= largest:
        raise TrainerError(f"min_bytes={settings.min_bytes} must lie in 4..max_bytes={largest}")
    if settings.iterations < 1:
        raise TrainerError(f"iterations={settings.iterations} must be at least 1")
    sizes = [settings.min_bytes]
    while sizes[-1] * _STEP <= largest:
        sizes.append(sizes[-1] * _STEP)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def gather_rank_infos(context: RankContext) -> list[RankInfo]:
    """Exchange the identities of all ranks, as a smoke test. Raises TrainerError."""
    ranks = context.ranks
    device = f"{context.device} {device_name(context.device)}"
    mine = RankInfo(rank=ranks.rank, node_rank=ranks.node_rank, host=socket.gethostname(), device=device)
    try:
        infos = [RankInfo(**content) for content in context.share(vars(mine))]
    except (ValueError, TypeError) as error:
        raise TrainerError(f"what a rank sent arrived damaged at rank {ranks.rank}: {error}") from error
    for rank, info in enumerate(infos):
        if info.rank != rank:
            raise TrainerError(f"in rank {rank}'s place rank {ranks.rank} got what rank {info.rank} sent")
    return infos


def _sweep(context: RankContext, sizes: Sequence[int], iterations: int) -> list[Timing]:
    _say(context, ["", f"all-reduce over {context.ranks.world_size} ranks, {context.backend}, float32", _HEADER])
    rows = []
    for size in sizes:
        rows.append(measure(size, device=context.device, iterations=iterations, group=None))
        _say(context, [_line(rows[-1])])
    return rows


def _pairs(
    context: RankContext, infos: Sequence[RankInfo], sizes: Sequence[int], iterations: int
) -> list[dict[str, Any]]:
    """Measure all ranks of two nodes at a time, one pair after the other, to find a slow link.

    Rank 0 gets all results.
    """
    nodes = sorted({info.node_rank for info in infos})
    if len(nodes) < 3:
        return []
    hosts = {info.node_rank: info.host for info in infos}
    size, rows = min(max(sizes), _PAIR_BYTES), []
    _say(context, ["", f"two nodes at a time, {size} bytes", f"{'nodes':<40}{_HEADER[12:]}"])
    for pair in itertools.combinations(nodes, 2):
        row = measure_nodes(context, infos, pair, size, iterations)
        names = [hosts[member] for member in pair]
        rows.append({"nodes": list(pair), "hosts": names, **row.as_json()})
        _say(context, [f"{' – '.join(names):<40}{_figures(row)}"])
    return rows


def measure_nodes(
    context: RankContext, infos: Sequence[RankInfo], nodes: Sequence[int], size_bytes: int, iterations: int
) -> Timing:
    """Time all-reduces of the ranks of some nodes while the others wait. Every rank calls it and gets the result.

    Args:
        nodes: their numbers; together they have at least two ranks.
    """
    members = [info.rank for info in infos if info.node_rank in nodes]
    group = dist.new_group(members)
    timing: Timing | None = None
    if isinstance(group, dist.ProcessGroup) and context.ranks.rank in members:
        timing = measure(size_bytes, device=context.device, iterations=iterations, group=group)
        dist.destroy_process_group(group)
    # ranks outside of the group wait here, so only one pair uses the network at a time
    return Timing(**context.share(vars(timing) if timing else {})[members[0]])


def _line(row: Timing) -> str:
    return f"{row.size_bytes:>12}{_figures(row)}"


def _figures(row: Timing) -> str:
    times = "".join(f"{seconds * 1e6:>12,.1f}" for seconds in (row.min_s, row.median_s, row.max_s))
    rates = "".join(f"{rate / 1e6:>11,.2f}" for rate in (row.algorithm_bytes_per_s, row.bus_bytes_per_s))
    return f"{row.n:>5}{times}{rates}  {row.wrong_elements}"


def _say(context: RankContext, lines: Sequence[str]) -> None:
    if context.is_rank_zero:
        print("\n".join(lines), flush=True)


def _result(
    context: RankContext, infos: Sequence[RankInfo], rows: Sequence[Timing], pairs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "version": 1,
        "unix_time": time.time(),
        "torch": torch.__version__,
        "backend": context.backend,
        "device": context.device.type,
        "dtype": "float32",
        "world_size": context.ranks.world_size,
        "nnodes": context.ranks.nnodes,
        "ranks": [vars(info) for info in infos],
        "rows": [row.as_json() for row in rows],
        "pairs": pairs,
    }


def measure(size_bytes: int, *, device: torch.device, iterations: int, group: dist.ProcessGroup | None) -> Timing:
    """Time all-reduces of ``size_bytes`` (float32, in place) over a group (None: all ranks), then check one.

    Every rank of the group calls it with the same arguments and gets the same result.
    """
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
    """Count the elements that differ from those of ``fill`` with this factor."""
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
    """Return the slowest rank's time of each measurement."""
    both = torch.tensor(times_s, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    slowest: list[float] = both.tolist()
    return slowest


def _check(buffer: Tensor, group: dist.ProcessGroup | None) -> int:
    """Count the wrong elements of one all-reduce, over all ranks of the group."""
    ranks = dist.get_world_size(group)
    fill(buffer, dist.get_rank(group) + 1)
    dist.all_reduce(buffer, group=group)
    wrong = torch.tensor([count_wrong(buffer, ranks * (ranks + 1) // 2)], device=buffer.device)
    dist.all_reduce(wrong, group=group)
    return int(wrong)
