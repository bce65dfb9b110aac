"""Whether any topology ends with the same weights (trainer.shards): one sha256 for each network, in a table.

    python benchmarks/topologies.py [models…] [--shards 8] [--steps 6] [--precisions fp32 bf16] [--without]

Each network is trained on 1×1, 1×2, 2×1, 1×4, 2×2 and 4×1 nodes × ranks over gloo, all of them on this computer, in the
environment that a torchrun on each node would give them, with one thread a rank. In the last column all ranks are
killed twice: it begins on 2×2, goes on on 1×2 (a host is lost for good) and ends on 4×1. small_cnn has dropout, the
others batch normalisation. ``--without`` leaves trainer.shards out, to see that the topology decides then. Exit
code 1 unless each row has one digest.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import ROOT, surroundings
from training import write_pack

TOPOLOGIES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))  # nodes, ranks of each
HANDED_ON = (((2, 2), 2), ((1, 2), 4), ((4, 1), None))  # a topology, and the step at which it is killed
BATCH = 32


def main() -> int:
    given = arguments()
    rows = [
        (model, precision, accumulate)
        for model in given.models
        for precision in given.precisions
        for accumulate in (1, 2)
    ]
    print(f"{surroundings()}; trainer.shards={given.shards}, {given.steps} steps")
    with tempfile.TemporaryDirectory() as temporary:
        table = columns(Path(temporary), given, rows)
        names = [*(f"{nodes}×{ranks}" for nodes, ranks in TOPOLOGIES), "2×2 → 1×2 → 4×1"]
    print(f"| network | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    differing = 0
    for (model, precision, accumulate), digests in zip(rows, zip(*table, strict=True), strict=True):
        what = f"{model}, {precision}{f', {accumulate} micro-batches a part' if accumulate > 1 else ''}"
        print(f"| {what} | {' | '.join(digest[:12] for digest in digests)} |")
        differing += len(set(digests)) > 1
    print(f"{differing} of {len(rows)} rows with more than one digest" if differing else "one digest in every row")
    return int(differing > 0)


def columns(place: Path, given: argparse.Namespace, rows: Sequence[tuple[str, str, int]]) -> list[list[str]]:
    """For each column the sha256 of each row's final weights."""
    write_pack(place / "data", count=512, val=60, test=60)
    found = []
    for nodes, ranks in TOPOLOGIES:
        run_dirs = [made(place / f"{nodes}x{ranks}-{number}", given, row) for number, row in enumerate(rows)]
        wait(launch(run_dirs, nodes, ranks))
        found.append([digest(run_dir) for run_dir in run_dirs])
        print(f"  {nodes}×{ranks} done", flush=True)
    killed = [made(place / f"killed-{number}", given, row) for number, row in enumerate(rows)]
    for run_dir in killed:
        for (nodes, ranks), step in HANDED_ON:
            processes = launch([run_dir], nodes, ranks)
            if step is None:
                wait(processes)
            else:
                kill(processes, run_dir / "checkpoints" / f"step-{step:08d}.json")
    return [*found, [digest(run_dir) for run_dir in killed]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["small_cnn", "resnet18", "whitened_cnn"])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="5 or more: the last kill comes after the fourth")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--without", dest="shards", action="store_const", const=0)
    return parser.parse_args()


def made(run_dir: Path, given: argparse.Namespace, row: tuple[str, str, int]) -> Path:
    """A run folder for a row of the table."""
    model, precision, accumulate = row
    trainer = {
        "epochs": 2,
        "max_steps": given.steps,
        "global_batch_size": BATCH,
        "accumulate_steps": accumulate,
        "shards": given.shards,
        "precision": precision,
        "log_every_steps": 3,
        "checkpoint_every_steps": 1,
    }
    config = {
        "seed": 0,
        "dataset": {"name": "synthetic", "crop_padding": 2, "flip": True},
        "model": {"name": model},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "schedule": {"name": "one_cycle"},
        "trainer": trainer,
        "strategy": {"name": "ddp"},
    }
    run_dir.mkdir()
    (run_dir / "data").symlink_to(run_dir.parent / "data")
    (run_dir / "config.json").write_text(json.dumps(config))
    return run_dir


def launch(run_dirs: Sequence[Path], nodes: int, ranks: int) -> list[subprocess.Popen[str]]:
    """The ranks, with the environment that a torchrun on each node would give them."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": str(nodes),
        "PORTS": " ".join(map(str, free_ports(len(run_dirs)))),
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "topologies_rank.py"), *map(str, run_dirs)]
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "GROUP_RANK": str(rank // ranks)}
        for rank in range(nodes * ranks)
    ]
    return [
        subprocess.Popen(
            command, env={**environment, **place}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for place in places
    ]


def wait(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Until all have ended well; else with the first error text."""
    for process in processes:
        _, said = process.communicate()
        if process.returncode:
            for other in processes:
                other.kill()
            sys.exit(f"a rank failed:\n{said}")


def kill(processes: Sequence[subprocess.Popen[str]], seen: Path) -> None:
    """SIGKILL to all ranks once a checkpoint is there."""
    while not seen.exists():
        if any(process.poll() for process in processes):
            wait(processes)
        time.sleep(0.01)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def digest(run_dir: Path) -> str:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return str(summary["weights_sha256"])


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


if __name__ == "__main__":
    sys.exit(main())
