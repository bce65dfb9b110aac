"""Two real ranks over gloo."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.test_pruned import train_on_this_rank
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary, start
from tests.waiting import HANG_S, wait_until
from trainers import classifier, torchrun
from trainers.core.options import load
from trainers.data.augment import normaliser
from trainers.data.pack import open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.models import ImageShape, build
from trainers.training.evaluation import Evaluator
from trainers.training.loop import Trainer
from trainers.training.session import run

SETTINGS = {"trainer__epochs": 30, "trainer__checkpoint_every_steps": 3}


TRAIN = "tests.trainers.test_pruned:train_on_this_rank"


def train_until_killed(run_dir: Path) -> None:
    """SIGKILL for all ranks: what a lost node looks like."""
    original = Trainer._one_step

    def killed(self: Trainer, *arguments: object) -> object:
        if self.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Trainer, "_one_step", killed):
        train_on_this_rank(run_dir)


@pytest.mark.ci
@pytest.mark.long
def test_two_ranks_train_evaluate_exactly_and_survive_a_kill(make_run: MakeRun) -> None:
    whole, broken = make_run("whole", **SETTINGS), make_run("broken", **SETTINGS)
    out, other = call_on_ranks(TRAIN, whole)
    assert "2 ranks on 1 node: cpu, gloo, fp32; batch 12 (6 a rank), 5 steps an epoch, 150 steps" in out
    assert "Traceback" not in out + other
    wanted = read_summary(whole)
    assert (wanted["state"], wanted["world_size"], wanted["nnodes"], wanted["steps"]) == ("FINISHED", 2, 1, 150)
    check_evaluation_alone(whole, wanted["metrics"]["test/accuracy"])

    call_on_ranks("tests.trainers.test_torchrun:train_until_killed", broken, fails=True)
    assert not (broken / "summary.json").exists()
    call_on_ranks(TRAIN, broken)
    assert read_summary(broken)["weights_sha256"] == wanted["weights_sha256"]
    assert [line["step"] for line in metrics_lines(broken)] == [line["step"] for line in metrics_lines(whole)]


def wait_for_step(run_dir: Path, step: int) -> None:
    path = run_dir / "metrics.jsonl"
    wait_until(lambda: f'"step": {step},' in (path.read_text() if path.exists() else ""), every_s=0.002)


def check_evaluation_alone(run_dir: Path, accuracy: float) -> None:
    """The weights load in stock torch, and one process counts what the two counted (17 images: 9 and 8)."""
    pack = open_pack(run_dir / "data")
    image = ImageShape(channels=1, height=8, width=8, num_classes=3)
    model = build(load(run_dir / "config.json").model, image)
    model.load_state_dict(torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True))
    context = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    scale = normaliser(pack.manifest, normalise=True, device=context.device)
    alone = Evaluator(
        model=model, pack=pack, context=context, normalise=scale, precision="fp32", batch_size=6
    ).evaluate("test")
    assert (alone.accuracy, alone.count) == (accuracy, 17)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_follow_the_same_path_as_one(make_run: MakeRun, accumulate: int) -> None:
    settings = {"model__dropout": 0.0, "trainer__log_every_steps": 1}
    alone = make_run("alone", **settings)
    pair = make_run("pair", trainer__accumulate_steps=accumulate, **settings)
    run(alone / "config.json")
    call_on_ranks(TRAIN, pair)
    losses = [
        [line["metrics"]["train/loss"] for line in metrics_lines(run_dir) if "train/loss" in line["metrics"]]
        for run_dir in (alone, pair)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


NOT_DIVIDED = "paceline: error: trainer.global_batch_size=9 does not divide among 2 ranks; nearest good values: 8, 10"


def command_line_of_this_rank(run_dir: Path) -> None:
    next_port()
    sys.argv = ["trainers.classifier", "--config", str(run_dir / "config.json")]
    classifier.main()


def test_ranks_that_cannot_start_say_why_once(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__global_batch_size=9)
    printed = call_on_ranks("tests.trainers.test_torchrun:command_line_of_this_rank", run_dir, fails=True)
    assert "".join(printed).count(NOT_DIVIDED) == 1


@pytest.mark.long
def test_what_a_rank_says_is_not_repeated_by_torchrun(make_run: MakeRun) -> None:
    process = start(make_run(trainer__global_batch_size=9), ranks=2)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert err.count(NOT_DIVIDED) == 1


NOT_HERE = "192.0.2.77"  # of RFC 5737


def test_the_store_listens_at_the_address_of_the_run_alone() -> None:
    store = torchrun.listen("127.0.0.1", 0)
    assert store is not None
    with socket.create_server(("127.0.0.2", store.port)), pytest.raises(OSError, match="Address already in use"):
        torchrun.listen("127.0.0.1", store.port)


def test_an_address_that_no_interface_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun.listen(NOT_HERE, 0) is None
    assert f"can't listen at {NOT_HERE} alone (Cannot assign requested address)" in capsys.readouterr().err


def test_a_node_waits_until_the_first_one_listens_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[tuple[str, int]]()

    def connect(place: tuple[str, int], _: float) -> socket.socket:
        tried.append(place)
        if len(tried) < 3:
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    torchrun.await_listener("node0", 4)
    assert tried == [("node0", 4)] * 3
    monkeypatch.setattr(torchrun, "_AWAIT_S", 0.0)
    torchrun.await_listener("node0", 4)
    assert len(tried) == 3, "torch reports what it can't reach"
