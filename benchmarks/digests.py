"""What trainer.digests=10 costs: a step's forward and backward pass and update, and one record, on this computer.

    python benchmarks/digests.py [MODEL …] [--batch 64] [--device cpu]

Prints the median of 15 steps and of 15 records, taken in turn, and the record's tenth as a share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import surroundings
from torch.nn import functional

from trainers.core.options import module
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.models import ImageShape
from trainers.training.digests import GRADIENTS, INPUTS, Digests, gradients_of

ROUNDS, EVERY = 15, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["small_cnn", "resnet18"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    print(f"{surroundings()}; {torch.get_num_threads()} threads, batch {given.batch}, {device}")
    for name in given.models:
        option = module("model", name)
        settings = next(item for item in vars(option).values() if getattr(item, "name", None) == name)
        model = option.build(settings(), ImageShape(channels=3, height=32, width=32, num_classes=10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        images = torch.randn(given.batch, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (given.batch,), device=device)
        steps, records = [], []
        with tempfile.TemporaryDirectory() as folder:
            digests = Digests(
                model, RankContext(ranks=Ranks(), device=device, backend="gloo"), Path(folder, "digests"), EVERY
            )
            for number in range(ROUNDS + 3):
                began = now(device)
                optimizer.zero_grad()
                functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                trained = now(device)
                digests.record(INPUTS, {"images": images, "labels": labels})
                digests.record(GRADIENTS, gradients_of(model))
                digests.end(number + 1)
                digests.write()
                if number >= 3:
                    steps.append(trained - began)
                    records.append(now(device) - trained)
        step, record = statistics.median(steps), statistics.median(records)
        print(f"{name}: step {step * 1e3:.2f} ms, record {record * 1e3:.2f} ms, {100 * record / EVERY / step:.2f} %")


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
