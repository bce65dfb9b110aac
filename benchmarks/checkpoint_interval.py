"""What frequent checkpoints cost, so that a kill repeats few steps: training time with them ÷ with the last one alone.

    python benchmarks/checkpoint_interval.py [pairs]

ResNet-18 on generated 32×32 images, and the quickstart's small CNN, 2 processor ranks over gloo; a checkpoint after
every step and after every tenth one. Each pair has a seed of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from measure import DOIT, ROOT, checked, interleaved, spread, surroundings

RESNET = ("model=resnet18", "dataset=synthetic", "trainer.max_steps=40", "trainer.global_batch_size=64")
SMALL = ("experiment=quickstart", "trainer.epochs=20")


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(surroundings())
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name, words in (("ResNet-18", RESNET), ("small CNN", SMALL)):
            for every in (1, 10):
                compare(place, name, words, every, pairs)
    return 0


def compare(place: Path, name: str, words: tuple[str, ...], every: int, pairs: int) -> None:
    often, once = interleaved(
        lambda seed: train_s(place / f"{name} {every} {seed}", words, every, seed),
        lambda seed: train_s(place / f"{name} {every} {seed} once", words, 10**6, seed),
        pairs,
    )
    ratios = [a / b for a, b in zip(often, once, strict=True)]
    print(f"{name}, a checkpoint every {every} steps ÷ one: {spread(ratios)}; {statistics.median(once):.2f} s with one")


def train_s(runs: Path, words: tuple[str, ...], every: int, seed: int) -> float:
    """Seconds of training of a new run."""
    where = [f"paths.runs='{runs}'", f"paths.data='{runs.parent}/data'", "tracking=none", f"seed={seed}"]
    saves = [f"trainer.checkpoint_every_steps={every}", "trainer.checkpoint_every_epochs=1000"]
    checked([*DOIT, "--db-file", str(runs.parent / "doit.db"), "train", *words, *saves, *where], cwd=ROOT)
    (path,) = runs.glob("*/summary.json")
    return float(json.loads(path.read_text())["train_s"])


if __name__ == "__main__":
    sys.exit(main())
