"""What the topology and a death change: nothing. Real ranks, with batch statistics of their own."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.trainers import other_model
from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.test_resume import DiedError
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.data.augment import EpochPlan
from trainers.distributed.ranks import read_ranks
from trainers.training.loop import Trainer
from trainers.training.session import run
from trainers.training.step import Stepper

LONG = pytest.mark.long
PLACES = ("_one_step", "_log", "_validate", "half a checkpoint", "checkpoint without its json")


def record_samples(run_dir: Path) -> None:
    """Train, and leave the sample ids that this rank took, step by step, in samples-<rank>.json."""
    if "TEST_PORTS" in os.environ:
        next_port()
    taken: list[list[int]] = []
    original = Stepper._backward

    def recording(self: Stepper, part: EpochPlan) -> Tensor:
        if taken:  # else a pass before the first step
            taken[-1].extend(part.index.tolist())
        return original(self, part)

    one_step = Trainer._one_step

    def stepping(self: Trainer, plan: EpochPlan, position: int) -> None:
        taken.append([])
        one_step(self, plan, position)

    with patch.object(Stepper, "_backward", recording), patch.object(Trainer, "_one_step", stepping):
        run(run_dir / "config.json")
    (run_dir / f"samples-{read_ranks().rank}.json").write_text(json.dumps(taken))


def global_batches(run_dir: Path) -> list[list[int]]:
    ranks = [json.loads(path.read_text()) for path in sorted(run_dir.glob("samples-*.json"))]
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("nnodes", "nproc", "accumulate"), [(1, 2, 3), (2, 1, 1)])
def test_every_global_batch_holds_the_same_samples(make_run: MakeRun, nnodes: int, nproc: int, accumulate: int) -> None:
    alone, many = make_run("alone"), make_run("many", trainer__accumulate_steps=accumulate)
    record_samples(alone)
    call_on_ranks("tests.trainers.test_exactness:record_samples", many, nnodes=nnodes, nproc=nproc)
    assert len(global_batches(alone)) == 15
    assert global_batches(many) == global_batches(alone)


def die(self: Trainer, place: str) -> None:
    """Leave what SIGKILL would leave in the checkpoint folder, and go."""
    path = self.run_dir / "checkpoints" / f"step-{self.step:08d}.pt"
    if self.context.is_rank_zero and place == "half a checkpoint":
        path.with_name(f".{path.name}.tmp").write_bytes(b"half")
    if self.context.is_rank_zero and place == "checkpoint without its json":
        path.write_bytes(b"whole, but nobody knows")
    raise DiedError


def die_and_go_on(folder: Path) -> None:
    """The run folders in ``folder``: ``whole`` once, each other one killed where its death.json says."""
    other_model.stand_in("resnet18")
    next_port()
    run(folder / "whole" / "config.json")
    for run_dir in sorted(folder.glob("broken*")):
        death = json.loads((run_dir / "death.json").read_text())
        method = death["place"] if death["place"].startswith("_") else "_save"
        original = getattr(Trainer, method)

        def dying(
            self: Trainer,
            *arguments: object,
            death: dict[str, Any] = death,
            original: Callable[..., object] = original,
            **named: object,
        ) -> object:
            if self.step >= death["step"]:
                die(self, death["place"])
            return original(self, *arguments, **named)

        next_port()
        with patch.object(Trainer, method, dying), pytest.raises(DiedError):
            run(run_dir / "config.json")
        next_port()
        run(run_dir / "config.json")


@pytest.mark.parametrize("deaths", [len(PLACES), pytest.param(12, marks=LONG)])
def test_two_ranks_that_die_at_random_steps_end_with_the_same_weights(
    make_run: MakeRun, tmp_path: Path, deaths: int
) -> None:
    """With accumulation, fp16 on the wire, a schedule half-way, checkpoints between the evaluations, and everything
    about an image that is random."""
    settings = {
        "model": {"name": "resnet18"},
        "trainer__accumulate_steps": 2,
        "trainer__checkpoint_every_steps": 2,
        "strategy__compression": "fp16",
        "dataset__crop_border": "reflect",
        "dataset__alternate_flip": True,
        "dataset__cutout": 3,
        "optimizer": {"name": "airbench_muon", "bias_lr": 0.1},
    }
    make_run("whole", **settings)
    chance = random.Random(20)
    steps = chance.sample(range(1, 15), deaths)
    for number, step in enumerate(steps):
        run_dir = make_run(f"broken{number:02d}", **settings)
        death = {"step": step, "place": PLACES[number % len(PLACES)]}
        (run_dir / "death.json").write_text(json.dumps(death))
    call_on_ranks("tests.trainers.test_exactness:die_and_go_on", tmp_path, groups=1 + 2 * deaths)
    wanted = read_summary(tmp_path / "whole")["weights_sha256"]
    found = {path.parent.name: read_summary(path.parent)["weights_sha256"] for path in tmp_path.glob("*/summary.json")}
    assert found == dict.fromkeys(["whole", *(f"broken{number:02d}" for number in range(deaths))], wanted)
    lines = [line["step"] for line in metrics_lines(tmp_path / "whole")]
    assert all([line["step"] for line in metrics_lines(tmp_path / name)] == lines for name in found)


def test_more_ranks_sum_in_the_same_order_after_a_death(make_run: MakeRun, tmp_path: Path) -> None:
    """A sum over more than two ranks depends on the buckets, which DistributedDataParallel makes anew in its first
    passes."""
    settings: dict[str, object] = {
        "model": {"name": "resnet18"},
        "trainer__accumulate_steps": 2,
        "trainer__checkpoint_every_steps": 1,
    }
    make_run("whole", **settings)
    deaths = (1, 7)
    for step in deaths:
        (make_run(f"broken{step}", **settings) / "death.json").write_text(
            json.dumps({"step": step, "place": "_one_step"})
        )
    target = "tests.trainers.test_exactness:die_and_go_on"
    call_on_ranks(target, tmp_path, nproc=3, groups=1 + 2 * len(deaths))
    found = {read_summary(path.parent)["weights_sha256"] for path in tmp_path.glob("*/summary.json")}
    assert len(found) == 1
    assert len(list(tmp_path.glob("*/summary.json"))) == 1 + len(deaths)
