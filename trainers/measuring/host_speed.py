"""How fast each host computes and adds up, alone and with each other: `doit preflight measure=1` starts it.

All ranks multiply matrices at the same time, as they would train; then all-reduces are timed within each node that has
several ranks, and between each two nodes, one group after the other. Rank 0 writes RUN_DIR/host_speed.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.contract import run_folder
from trainers.entry import leave, run_entry

if TYPE_CHECKING:
    import torch

    from trainers.distributed.process_group import Node
    from trainers.measuring.bandwidth import RankInfo

SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices: large enough that a device works as in a training
BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # of a message
_SAMPLES = 10
_SAMPLE_S = 0.05  # at least


def main() -> None:
    """The command line. A user's error is one line on stderr, once a node, and exit code 1."""
    parser = argparse.ArgumentParser(prog="trainers.measuring.host_speed", description="Speed of each host and pair.")
    parser.add_argument("--config", type=Path, required=True, help="config.json, beside which the figures are written")
    path: Path = parser.parse_args().config
    run_entry(lambda: run(_backend(path), path.parent / run_folder.HOST_SPEED))


def _backend(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["strategy"]["backend"])


def run(backend: str, output: Path, *, side: int | None = None, size_bytes: int | None = None) -> None:
    """Measure and report. Every rank calls it.

    Args:
        side: of the matrices; None: what fits the device.
        size_bytes: of a message; None: what fits the device.

    Raises:
        TrainerError: the ranks can't meet.
    """
    from trainers.core.files import write_json
    from trainers.distributed.affinity import take_cores
    from trainers.distributed.connecting import connect
    from trainers.distributed.process_group import read_ranks
    from trainers.measuring.bandwidth import gather_rank_infos

    take_cores(read_ranks())
    with connect(backend) as node:
        infos = gather_rank_infos(node)
        side, size_bytes = side or SIDE[node.device.type], size_bytes or BYTES[node.device.type]
        speeds = node.share(multiply_flop_per_s(node.device, side))
        groups = _groups(node, infos, size_bytes)
        if node.is_rank_zero:
            ranks = [{**vars(info), "flop_per_s": speed} for info, speed in zip(infos, speeds, strict=True)]
            write_json(output, {**_surroundings(node), "side": side, "ranks": ranks, "groups": groups})


def multiply_flop_per_s(device: torch.device, side: int) -> float:
    """Operations a second of this rank in products of square matrices: bf16 on a GPU, float32 else. Median."""
    import torch

    from trainers.measuring.bandwidth import settle

    left = torch.ones(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    into = torch.empty_like(left)

    def seconds(products: int) -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(products):
            torch.matmul(left, left, out=into)
        settle(device)
        return (time.perf_counter() - began) / products

    seconds(2)  # libraries and clocks are woken by the first ones
    products = max(1, round(_SAMPLE_S / seconds(1)))
    return 2.0 * side**3 / statistics.median(seconds(products) for _ in range(_SAMPLES))


def _groups(node: Node, infos: Sequence[RankInfo], size_bytes: int) -> list[dict[str, Any]]:
    """Each node with several ranks, then each two nodes."""
    from trainers.measuring.bandwidth import measure_nodes

    nodes = sorted({info.node_rank for info in infos})
    ranks = [info.node_rank for info in infos]
    groups: list[tuple[int, ...]] = [(number,) for number in nodes if ranks.count(number) > 1]
    groups += itertools.combinations(nodes, 2)
    return [
        {"nodes": list(group), **measure_nodes(node, infos, group, size_bytes, _SAMPLES).as_json()} for group in groups
    ]


def _surroundings(node: Node) -> dict[str, Any]:
    import torch

    cuda = node.device.type == "cuda"
    return {
        "version": 1,
        "unix_time": time.time(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "backend": node.backend,
        "device": node.device.type,
    }


if __name__ == "__main__":
    main()
    leave()
