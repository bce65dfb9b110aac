"""How fast and how right the ranks add up: ``torchrun … -m trainers.measuring.allreduce [--max-bytes 1G]``.

First every rank tells who it is through an all-gather, then all-reduces are timed from the smallest to the
largest message, and with more than two nodes also between each two of them. Rank 0 prints the tables, and
with ``--config RUN_DIR/config.json`` (how `doit allreduce` starts it) writes RUN_DIR/allreduce.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.contract import run_folder
from trainers.distributed.isolation import leave_snapshot_and_installed
from trainers.entry import leave

if TYPE_CHECKING:
    from trainers.distributed.process_group import Node
    from trainers.measuring.bandwidth import Timing

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SMALLEST_BYTES = 8
_LARGEST_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}  # over processors' memory a gigabyte takes long, tells no more
_PAIR_BYTES = 16 << 20
_STEP = 4  # each message is so many times the one before
_CARD_BYTES = 256  # what a rank tells of itself


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Message sizes in bytes (``max_bytes`` None: what fits the backend), measurements a size."""

    min_bytes: int = _SMALLEST_BYTES
    max_bytes: int | None = None
    iterations: int = 20
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Who a rank is, in its own words."""

    rank: int
    node_rank: int
    host: str
    device: str


def main() -> None:
    """The command line. A user's error is one line on stderr, once a node, and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="trainers.measuring.allreduce", description="All-reduce bandwidth of these ranks."
    )
    parser.add_argument("--config", type=Path, help="config.json whose section `allreduce` holds the options below")
    parser.add_argument("--min-bytes", type=size_bytes, help="smallest message (8)")
    parser.add_argument("--max-bytes", type=size_bytes, help="largest message (1G; over gloo 64M)")
    parser.add_argument("--iterations", type=int, help="measurements a size (20)")
    parser.add_argument("--backend", help="auto, gloo or nccl")
    parser.add_argument("--output", type=Path, help="where rank 0 writes the figures as JSON")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    config, output = given.pop("config", None), given.pop("output", None)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # a node needs no numpy
    leave_snapshot_and_installed()
    from torch.distributed.elastic.multiprocessing.errors import record  # torch only after the arguments hold

    from trainers.core.errors import TrainerError
    from trainers.distributed.process_group import read_ranks

    try:
        settings = Settings(**{**(read(config) if config else {}), **given})
        record(run)(settings, output or (config.parent / run_folder.ALLREDUCE if config else None))
    except TrainerError as error:
        if read_ranks().local_rank == 0:
            print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def size_bytes(text: str) -> int:
    """``64M`` → 67108864; K, M and G are powers of 1024. Raises ValueError."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{text!r} is no size; write 8, 64K, 16M or 1G")
    return int(number) * _UNITS[unit]


def read(path: Path) -> dict[str, Any]:
    """The options that config.json sets. Raises TrainerError."""
    from trainers.core.errors import TrainerError

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path} cannot be read: {error}") from error
    return {"backend": raw.get("strategy", {}).get("backend", "auto"), **raw.get("allreduce", {})}


def run(settings: Settings, output: Path | None) -> None:
    """Measure and report. Every rank calls it.

    Raises:
        TrainerError: there is one rank only, sizes that make no sense, or a sum that came out wrong.
    """
    from trainers.core.errors import TrainerError
    from trainers.core.files import write_json
    from trainers.distributed.connecting import connect

    with connect(settings.backend) as node:
        if node.ranks.world_size < 2:
            raise TrainerError("an all-reduce needs at least 2 ranks; try cluster.nproc_per_node=2 or a cluster")
        infos = gather_rank_infos(node)
        sizes = message_sizes(settings, node.backend)
        _say(node, [f"rank {info.rank}  node {info.node_rank}  {info.host}  {info.device}" for info in infos])
        rows = _sweep(node, sizes, settings.iterations)
        pairs = _pairs(node, infos, sizes, settings.iterations)
        if node.is_rank_zero and output is not None:
            write_json(output, _result(node, infos, rows, pairs))
        wrong = [f"{row.size_bytes} bytes: {row.wrong_elements} elements" for row in rows if row.wrong_elements]
        wrong += [f"{' – '.join(pair['hosts'])}: {pair['wrong_elements']}" for pair in pairs if pair["wrong_elements"]]
        if wrong:
            raise TrainerError(f"all-reduces gave wrong sums ({'; '.join(wrong)}); the network or a device is faulty")


def message_sizes(settings: Settings, backend: str) -> list[int]:
    """From the smallest to the largest, each four times the one before. Raises TrainerError."""
    from trainers.core.errors import TrainerError

    largest = settings.max_bytes or _LARGEST_BYTES[backend]
    if not 4 <= settings.min_bytes <= largest:
        raise TrainerError(f"min_bytes={settings.min_bytes} must lie in 4..max_bytes={largest}")
    if settings.iterations < 1:
        raise TrainerError(f"iterations={settings.iterations} must be at least 1")
    sizes = [settings.min_bytes]
    while sizes[-1] * _STEP <= largest:
        sizes.append(sizes[-1] * _STEP)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def gather_rank_infos(node: Node) -> list[RankInfo]:
    """The smoke test: what every rank says of itself, as it arrived here. Raises TrainerError."""
    import torch
    import torch.distributed as dist

    from trainers.core.errors import TrainerError
    from trainers.distributed.node_info import device_name

    ranks, device = node.ranks, node.device
    text = json.dumps([ranks.rank, ranks.node_rank, socket.gethostname()[:64], f"{device} {device_name(device)}"[:64]])
    content = text.encode("ascii")[:_CARD_BYTES].ljust(_CARD_BYTES)  # bytes, as torch's own object gather needs numpy
    mine = torch.tensor(list(content), dtype=torch.uint8, device=device)
    gathered = [torch.zeros_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, mine)
    infos = []
    for rank, tensor in enumerate(gathered):
        try:
            info = RankInfo(**dict(zip(RankInfo.__dataclass_fields__, json.loads(bytes(tensor.tolist())), strict=True)))
        except (ValueError, TypeError) as error:
            raise TrainerError(f"what rank {rank} sent arrived damaged at rank {ranks.rank}: {error}") from error
        if info.rank != rank:
            raise TrainerError(f"in rank {rank}'s place rank {ranks.rank} got what rank {info.rank} sent")
        infos.append(info)
    return infos


def _sweep(node: Node, sizes: Sequence[int], iterations: int) -> list[Timing]:
    from trainers.measuring.bandwidth import measure

    _say(node, ["", f"all-reduce over {node.ranks.world_size} ranks, {node.backend}, float32", _HEADER])
    rows = []
    for size in sizes:
        rows.append(measure(size, device=node.device, iterations=iterations, group=None))
        _say(node, [_line(rows[-1])])
    return rows


def _pairs(node: Node, infos: Sequence[RankInfo], sizes: Sequence[int], iterations: int) -> list[dict[str, Any]]:
    """All ranks of two nodes at a time, one pair after the other: a slow link shows. Rank 0 gets all figures."""
    nodes = sorted({info.node_rank for info in infos})
    if len(nodes) < 3:
        return []
    hosts = {info.node_rank: info.host for info in infos}
    size, found = min(max(sizes), _PAIR_BYTES), []
    _say(node, ["", f"two nodes at a time, {size} bytes", f"{'nodes':<40}{_HEADER[12:]}"])
    for pair in itertools.combinations(nodes, 2):
        row = measure_nodes(node, infos, pair, size, iterations)
        names = [hosts[member] for member in pair]
        found.append({"nodes": list(pair), "hosts": names, **row.as_json()})
        _say(node, [f"{' – '.join(names):<40}{_figures(row)}"])
    return found


def measure_nodes(
    node: Node, infos: Sequence[RankInfo], nodes: Sequence[int], size_bytes: int, iterations: int
) -> Timing:
    """All-reduces of the ranks of some nodes while the others wait; every rank calls it and gets the figures.

    Args:
        nodes: their numbers; together they have at least two ranks.
    """
    import torch.distributed as dist

    from trainers.measuring.bandwidth import measure

    members = [info.rank for info in infos if info.node_rank in nodes]
    group = dist.new_group(members)
    timing: Timing | None = None
    if isinstance(group, dist.ProcessGroup) and node.ranks.rank in members:
        timing = measure(size_bytes, device=node.device, iterations=iterations, group=group)
        dist.destroy_process_group(group)
    return _shared(node, timing, owner=members[0])


def _shared(node: Node, timing: Timing | None, *, owner: int) -> Timing:
    """The owner's timing, on every rank; those who took no part wait here, so one pair is on the network at a time."""
    import torch
    import torch.distributed as dist

    from trainers.measuring.bandwidth import Timing

    names = list(Timing.__dataclass_fields__)
    values = [float(getattr(timing, name)) for name in names] if timing else [0.0] * len(names)
    both = torch.tensor(values, dtype=torch.float64, device=node.device)
    dist.broadcast(both, src=owner)
    whole = {
        name: value if name.endswith("_s") else int(value) for name, value in zip(names, both.tolist(), strict=True)
    }
    return Timing(**whole)


_HEADER = f"{'bytes':>12}{'n':>5}{'min µs':>12}{'median µs':>12}{'max µs':>12}{'alg MB/s':>11}{'bus MB/s':>11}  wrong"


def _line(row: Timing) -> str:
    return f"{row.size_bytes:>12}{_figures(row)}"


def _figures(row: Timing) -> str:
    times = "".join(f"{seconds * 1e6:>12,.1f}" for seconds in (row.min_s, row.median_s, row.max_s))
    rates = "".join(f"{rate / 1e6:>11,.2f}" for rate in (row.algorithm_bytes_per_s, row.bus_bytes_per_s))
    return f"{row.n:>5}{times}{rates}  {row.wrong_elements}"


def _say(node: Node, lines: Sequence[str]) -> None:
    if node.is_rank_zero:
        print("\n".join(lines), flush=True)


def _result(
    node: Node, infos: Sequence[RankInfo], rows: Sequence[Timing], pairs: list[dict[str, Any]]
) -> dict[str, Any]:
    import torch

    return {
        "version": 1,
        "unix_time": time.time(),
        "torch": torch.__version__,
        "backend": node.backend,
        "device": node.device.type,
        "dtype": "float32",
        "world_size": node.ranks.world_size,
        "nnodes": node.ranks.nnodes,
        "ranks": [vars(info) for info in infos],
        "rows": [row.as_json() for row in rows],
        "pairs": pairs,
    }


if __name__ == "__main__":
    main()
    leave()
