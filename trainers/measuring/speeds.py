"""Measure matrix products of each rank, and all-reduces of each node and each pair of nodes. Imports torch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainers.core.files import write_json
from trainers.distributed.connecting import connect
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import read_ranks
from trainers.distributed.resources import take_cores
from trainers.measuring.bandwidth import RankInfo, gather_rank_infos, measure_nodes, settle

_SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices: large enough for the full speed of a training
_MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_SAMPLES = 10
_SAMPLE_S = 0.05  # minimum


def run(backend: str, output: Path, *, side: int | None = None, size_bytes: int | None = None) -> None:
    """Measure and report. Every rank must call it.

    Args:
        side: of the matrices; None: the device's default.
        size_bytes: of a message; None: the device's default.

    Raises:
        TrainerError: the ranks can't connect.
    """
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
    """Measure each node with several ranks, then each pair of nodes."""
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
