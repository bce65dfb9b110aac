"""How often `doit diff` names a planted change: its step, rank and operator; and whether equal pairs are found equal.

    python benchmarks/divergence.py [PLANTS] [SEED] [PAIRS]

Each plant is one unit in the last place (of a mask one value), in a run of 2 ranks and 16 steps over gloo with
trainer.digests=1: of a weight, of a buffer, of an image, of one rank's gradient, of a dropout mask, or of one rank's
result of the all-reduce. The digests of the run and of one without a plant are compared, both are replayed from the
last equal checkpoint, and the answer is compared with the plant. PAIRS runs without a plant are compared with it too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, surroundings
from topologies import free_ports, wait
from training import write_pack

from pipeline.reproduction import divergence

STEPS, SAVED, RANKS = 16, 4, 2
WEIGHTS = tuple(f"{name}.{what}" for name in ("first.0", "second.0", "last") for what in ("weight", "bias"))
BUFFERS = tuple(f"{name}.1.{what}" for name in ("first", "second") for what in ("running_mean", "running_var"))
KINDS = {
    "a weight": lambda chance: {"operator": "weights", "name": chance.choice(WEIGHTS)},
    "a buffer": lambda chance: {"operator": "buffers", "name": chance.choice(BUFFERS)},
    "an image": lambda _: {"operator": "inputs"},
    "one rank's gradient": lambda chance: {
        "operator": "aten.convolution_backward.default",
        "number": chance.randrange(2),
    },
    "a dropout mask": lambda _: {"operator": "aten.bernoulli_.float", "number": 0},
    "an all-reduce": lambda chance: {"operator": "gradients", "name": chance.choice(WEIGHTS)},
}


def main() -> int:
    plants, seed, pairs = (int(word) for word in [*sys.argv[1:], *("50", "0", "20")[len(sys.argv) - 1 :]])
    chance = random.Random(seed)
    print(
        f"{surroundings()}; {plants} plants, seed {seed}, {pairs} equal pairs, {RANKS} ranks, digests of every step, "
        f"checkpoints every {SAVED}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_pack(place / "data", count=512, val=0, test=16)
        equal = [made(place / f"equal{number}") for number in range(1 + pairs)]
        train([job(folder, None) for folder in equal], place)
        reference = divergence.read(equal[0])
        wrong = sum(
            divergence.first_difference(reference, divergence.read(folder))[0] is not None for folder in equal[1:]
        )
        planted: list[tuple[str, Any, Path, Any]] = []
        without = 0
        while len(planted) < plants:  # a change that rounding swallows in its own step leaves nothing to find
            kinds = [[*KINDS][number % len(KINDS)] for number in range(len(planted), plants)]
            drawn = [
                {"step": chance.randint(1, STEPS), "rank": chance.randrange(RANKS), "at": chance.randrange(1 << 16),
                 **KINDS[kind](chance)} for kind in kinds
            ]  # fmt: skip
            folders = [made(place / f"run{len(planted) + without + number}") for number in range(len(drawn))]
            train([job(folder, plant) for folder, plant in zip(folders, drawn, strict=True)], place)
            for kind, plant, folder in zip(kinds, drawn, folders, strict=True):
                difference, _ = divergence.first_difference(reference, divergence.read(folder))
                if difference is None:
                    without += 1
                else:
                    planted.append((kind, plant, folder, difference))
        found = replays(place, equal[0], planted)
    right = 0
    counts = {kind: [0, 0] for kind in KINDS}
    for (kind, plant, _, difference), origin in zip(planted, found, strict=True):
        is_right = origin is not None and (origin.step, origin.ranks, origin.operator) == (
            plant["step"], (plant["rank"],), plant["operator"])  # fmt: skip
        right += is_right
        counts[kind][0] += is_right
        counts[kind][1] += 1
        if not is_right:
            print(f"  wrong: {kind} {plant}: {difference}; {origin}")
    for kind, (good, of) in counts.items():
        print(f"| {kind} | {good} of {of} |")
    print(
        f"{right} of {plants} named by step, rank and operator; {wrong} of {pairs} equal pairs found to differ; "
        f"{without} more changed no digest"
    )
    return int(right < 0.96 * plants or wrong > 0)


def replays(place: Path, reference: Path, planted: list[tuple[str, Any, Path, Any]]) -> list[Any]:
    """The origin of each plant; None: the replays are equal."""
    parts = sorted({(difference.equal + 1, difference.step) for *_, difference in planted})
    jobs = [replayed(reference, place / f"replay-{first}", None, first, last) for first, last in parts]
    works = [folder.with_name(f"replay-of-{folder.name}") for _, _, folder, _ in planted]
    for (_, plant, folder, difference), work in zip(planted, works, strict=True):
        jobs.append(replayed(folder, work, plant, difference.equal + 1, difference.step))
    train(jobs, place)
    return [
        divergence.origin(divergence.recorded(place / f"replay-{difference.equal + 1}"), divergence.recorded(work))
        for (*_, difference), work in zip(planted, works, strict=True)
    ]


def made(run_dir: Path) -> Path:
    config = {
        "seed": 0,
        "dataset": {"name": "synthetic", "crop_padding": 2, "flip": True},
        "model": {"name": "own", "target": "divergence_rank:Net"},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "schedule": {"name": "one_cycle"},
        "trainer": {
            "epochs": 2, "max_steps": STEPS, "global_batch_size": 32, "precision": "fp32", "log_every_steps": SAVED,
            "checkpoint_every_steps": SAVED, "keep_checkpoints": STEPS, "digests": 1,
        },
        "strategy": {"name": "ddp"},
    }  # fmt: skip
    run_dir.mkdir()
    (run_dir / "data").symlink_to(run_dir.parent / "data")
    (run_dir / "config.json").write_text(json.dumps(config))
    return run_dir


def job(folder: Path, plant: Any, steps: str = "") -> dict[str, Any]:
    return {"folder": str(folder), "plant": plant, "steps": steps}


def replayed(folder: Path, work: Path, plant: Any, first: int, last: int) -> dict[str, Any]:
    divergence.prepare(folder, work, first=first)
    return job(work, plant, f"{first}-{last}")


def train(jobs: list[dict[str, Any]], place: Path) -> None:
    """Run the jobs one after the other, in the same two processes."""
    for one, port in zip(jobs, free_ports(len(jobs)), strict=True):
        one["port"] = port
    listed = place / "jobs.json"
    listed.write_text(json.dumps(jobs))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "JOBS": str(listed),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmarks" / "divergence_rank.py")]
    wait([
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
