"""A run's learning curve as a picture: training loss, validation accuracy, learning rate over the epochs.

python benchmarks/curve.py runs/KEY docs/images/NAME.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def main() -> int:
    run_dir, target = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run_dir / "result.json").read_text())
    steps_an_epoch = result["steps"] / result["epochs"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    panels = (("train/loss", left, "C0", "-"), ("lr", left.twinx(), "0.7", ":"), ("val/accuracy", right, "C1", "o-"))
    for name, axes, colour, style in panels:
        points = [(line["step"] / steps_an_epoch, line["metrics"][name]) for line in lines if name in line["metrics"]]
        axes.plot(*zip(*points, strict=True), style, color=colour, markersize=3, linewidth=1)
        axes.set_ylabel(name, color=colour)
        axes.set_xlabel("epoch")
    accuracy = result["metrics"]["test/accuracy"]
    right.axhline(accuracy, color="C2", linewidth=0.8, linestyle="--")
    place = {"xytext": (0, -3), "textcoords": "offset points"}  # below the line
    right.annotate(f"test {accuracy:.4f}", (1, accuracy), color="C2", va="top", fontsize=8, **place)
    right.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
