"""`doit report` of a sweep of a hundred trials: how long it takes, and how large its page is.

    python benchmarks/report.py [trials] [rows] [repetitions]

The run folders are made by the tests' own builder: configurations of five seeds each, with so many rows of metrics.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

TARGET_S, TARGET_BYTES = 5.0, 3_000_000
SEEDS = 5


def main() -> int:
    told = [int(word) for word in sys.argv[1:]]
    trials, rows, repetitions = [*told, *(100, 500, 5)[len(told) :]]
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary, "runs")
        make(runs, trials, rows)
        taken, used = [], []
        for _ in range(repetitions + 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.perf_counter()
            checked([*DOIT, "report", f"paths.runs={runs}"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
            taken.append(time.perf_counter() - started)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        size = (runs / "reports" / "sweep-tuned.html").stat().st_size
    print(f"doit report, {trials} trials of {rows} rows; {surroundings()}")
    print(f"{spread(taken[1:], 's')}; target {TARGET_S} s; processor {spread(used[1:], 's')}")  # the first warmed up
    print(f"{size:,} bytes; target {TARGET_BYTES:,}")
    return 0 if sorted(taken[1:])[len(taken[1:]) // 2] <= TARGET_S and size <= TARGET_BYTES else 1


def make(runs: Path, trials: int, rows: int) -> None:
    """Run folders and the folder of their sweep."""
    sys.path.insert(0, str(ROOT))
    from tests.pipeline.comparing_folders import swept, trained

    dice = random.Random(0)
    folders = []
    for number in range(trials):
        group, seed = divmod(number, SEEDS)
        lr, width = 0.001 * 1.3**group, 8 * (1 + group % 4)
        accuracy = 0.9 - 0.02 * abs(group - 9) + dice.gauss(0, 0.01)
        model = {"name": "small_cnn", "width": width}
        folder = trained(runs, seed, lr, accuracy=accuracy, metrics={"val/accuracy": accuracy}, model=model)
        (folder.path / "metrics.jsonl").write_text("".join(_row(step, accuracy, dice) for step in range(1, rows + 1)))
        folders.append(folder)
    swept(runs, folders, ["experiment=quickstart", "optimizer.lr=…"])


def _row(step: int, accuracy: float, dice: random.Random) -> str:
    near = 1 - math.exp(-step / 80)
    metrics = {
        "train/loss": 2.3 * (1 - near) + 0.05 + abs(dice.gauss(0, 0.02)),
        "train/images_per_s": 4000 + dice.gauss(0, 200),
        "lr": 0.1 * (1 - step / 1000),
        "val/accuracy": accuracy * near,
        "val/loss": 2.3 * (1 - near * accuracy),
    }
    return json.dumps({"t": 1.7e9 + step, "step": step, "epoch": step // 100 + 1, "metrics": metrics}) + "\n"


if __name__ == "__main__":
    sys.exit(main())
