"""SIGTERM in the middle of an epoch: all ranks save the step at which they end, and the run goes on from there."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from tests.trainers.ranks import call_on_ranks
from tests.trainers.test_pruned import train_on_this_rank
from tests.trainers.test_torchrun import wait_for_step
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary, start
from tests.waiting import HANG_S
from trainers.distributed.ranks import read_ranks
from trainers.training.loop import Trainer
from trainers.training.session import run

SETTINGS = {"trainer__epochs": 120, "trainer__checkpoint_every_epochs": 120, "trainer__eval_every_epochs": 120}


def ranks_of(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [
        item
        for item in found
        if "trainers.classifier" in item.cmdline() and "torch.distributed.run" not in item.cmdline()
    ]


def losses_of(run_dir: Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line["metrics"].get("train/loss")) for line in metrics_lines(run_dir)]


def train_until_terminated(run_dir: Path) -> None:
    """Both ranks get the signal, as from torchrun: not at the same step."""
    original = Trainer._one_step

    def terminated(self: Trainer, *arguments: object) -> object:
        if self.step == 12 + read_ranks().rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Trainer, "_one_step", terminated):
        train_on_this_rank(run_dir)


def terminated(run_dir: Path, whom: str) -> str:
    """What a training prints that is ended by SIGTERM."""
    if whom == "both ranks":
        return call_on_ranks("tests.trainers.test_termination:train_until_terminated", run_dir, fails=True)[0]
    process = start(run_dir, ranks=2)
    wait_for_step(run_dir, 12)
    if whom == "torchrun":
        process.send_signal(signal.SIGTERM)
    else:
        ranks_of(process.pid)[-1].send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode != 0
    return out


@pytest.mark.parametrize(
    "whom", ["both ranks", *(pytest.param(name, marks=pytest.mark.long) for name in ("torchrun", "one rank"))]
)
def test_two_ranks_save_one_step_and_end_with_the_weights_of_an_undisturbed_run(make_run: MakeRun, whom: str) -> None:
    settings = {**SETTINGS, "trainer__epochs": 6} if whom == "both ranks" else SETTINGS
    whole, broken = make_run("whole", **settings), make_run("broken", **settings)
    out = terminated(broken, whom)
    told = re.search(r"stopped by SIGTERM after step (\d+), which is saved: the same command goes on", out)
    assert told, out
    assert [path.name for path in (broken / "checkpoints").glob("*.pt")] == [f"step-{int(told[1]):08d}.pt"]

    said = call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", broken)[0]
    assert f"resumed from step {told[1]} " in said
    call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", whole)
    assert read_summary(broken)["weights_sha256"] == read_summary(whole)["weights_sha256"]
    assert losses_of(broken) == losses_of(whole)


def test_the_signals_own_handler_is_there_again_after_a_training(make_run: MakeRun) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(make_run(trainer__epochs=1) / "config.json")
    assert signal.getsignal(signal.SIGTERM) == before
