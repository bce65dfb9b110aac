"""What trainer.shards costs: a step with it beside one without that has the same micro-batches, in interleaved pairs.

    python benchmarks/shards.py [model] [pairs] [--shards 8] [--ranks 1 2 4] [--precision bf16]

Without shards, strategy=ddp takes as many micro-batches on each rank (trainer.accumulate_steps), so both compute the
same; what differs is the order of the sums, batch statistics for each part, and over more than two ranks two exchanges
in place of an all-reduce. One thread a rank. The target is at most 1.10 of the wall time of a step.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from measure import interleaved, surroundings, verdict
from training import OTHER_SIZE, SIZES, launch, write_pack

from trainers.training.model_setup import computes_in_bf16

TARGET = 1.10


def main() -> int:
    given = arguments()
    batch, steps = SIZES.get(given.model, OTHER_SIZE)
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary)
        write_pack(run_dir / "data")
        for ranks in given.ranks:

            def seconds(divided: list[str], ranks: int = ranks) -> float:
                shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # each launch begins at the first step
                (run_dir / "metrics.jsonl").unlink(missing_ok=True)
                words = ["paceline", given.model, str(batch), str(steps), given.precision, str(run_dir), *divided]
                return launch(sys.executable, words, ranks=ranks)["wall_s"]

            shards, micro_batches = [f"--shards={given.shards}"], [f"--accumulate={given.shards // ranks}"]
            where = f"{ranks} rank{'s' if ranks > 1 else ''}, global batch {batch} in {given.shards}"
            print(f"{given.model}, {given.precision}, {where}, {steps} steps a launch; {surroundings()}")
            ours, plain = interleaved(
                lambda _, words=shards: seconds(words), lambda _, words=micro_batches: seconds(words), given.pairs
            )
            missed += verdict((f"trainer.shards={given.shards}", "strategy=ddp"), ours, plain, TARGET)
    return int(missed > 0)


def arguments() -> argparse.Namespace:
    best = "bf16" if computes_in_bf16(torch.device("cpu")) else "fp32"
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="resnet18")
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=best)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
