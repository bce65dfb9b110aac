"""cifar10_speedrun with many seeds: accuracy and seconds of training as mean and spread.

    python benchmarks/speedrun.py [seeds] [overrides…]
    python benchmarks/speedrun.py 20
    python benchmarks/speedrun.py 5 dataset.source=FOLDER dataset.holdout=5000    # without the test batch
    python benchmarks/speedrun.py 20 --folder DIR                                 # goes on from DIR

Each seed is a process of the node half of its own. Training seconds begin with the first step and end with the last;
compilation comes before and has a row of its own, the evaluation comes after. With --folder, configuration and data
are kept in DIR; where they are there already, torch is all that is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainers.distributed.node_hardware import device_name

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.94


def main() -> int:
    parser = argparse.ArgumentParser(description="Train cifar10_speedrun with many seeds.")
    parser.add_argument("seeds", type=int, nargs="?", default=10)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if not (folder / "config.json").exists():
            prepare(folder, given.overrides)
        elif given.overrides:
            sys.exit(f"{folder}/config.json is there already: remove it, or leave out {' '.join(given.overrides)}")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(f"{device_name(device)}; torch {torch.__version__}, Python {platform.python_version()}", flush=True)
        results = [train(folder, seed) for seed in range(given.seeds)]
    mean = report(results)
    print(f"mean accuracy at least {TARGET}: {'reached' if mean >= TARGET else 'MISSED'}")
    return 0 if mean >= TARGET else 1


def prepare(folder: Path, overrides: Sequence[str]) -> None:
    """config.json and data/ of a run folder. Needs the controller half."""
    from pipeline.config.build import train_config
    from pipeline.config.compose import compose_config, resolve
    from pipeline.core.errors import PacelineError
    from pipeline.data.store import fetch

    try:
        config = resolve(compose_config(["experiment=cifar10_speedrun", *overrides]))
        pack = fetch(train_config(config).dataset, ROOT / config["paths"]["data"])
    except PacelineError as error:
        sys.exit(str(error))
    shutil.copytree(pack.path, folder / "data")
    (folder / "config.json").write_text(json.dumps(config))


def train(folder: Path, seed: int) -> dict[str, Any]:
    """summary.json of one run."""
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary)
        (run_dir / "config.json").write_text(json.dumps({**config, "seed": seed}))
        (run_dir / "data").symlink_to((folder / "data").resolve())
        command = [sys.executable, "-m", "trainers.classifier", "--config", str(run_dir / "config.json")]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"seed {seed} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    accuracy, seconds = summary["metrics"]["test/accuracy"], summary["train_s"]
    print(f"  seed {seed}: accuracy {accuracy:.4f}, {seconds:.3f} s of training", flush=True)
    return summary


def report(results: Sequence[dict[str, Any]]) -> float:
    """Print the table; returns the mean accuracy."""
    rows = {
        "test accuracy": [item["metrics"]["test/accuracy"] for item in results],
        "training, s": [item["train_s"] for item in results],
        "before it (compilation, first kernels), s": [item["warm_up_s"] for item in results],
    }
    print(f"{'':<44}{'n':>4}{'mean':>10}{'sd':>10}{'min':>10}{'max':>10}")
    for name, values in rows.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        figures = (statistics.mean(values), spread, min(values), max(values))
        print(f"{name:<44}{len(values):>4}" + "".join(f"{figure:>10.4f}" for figure in figures))
    return statistics.mean(rows["test accuracy"])


if __name__ == "__main__":
    sys.exit(main())
