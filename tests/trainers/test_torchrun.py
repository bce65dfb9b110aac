"""Two real ranks over gloo."""

from pathlib import Path

import psutil
import pytest
import torch

from tests.trainers.ranks import call_on_ranks
from tests.trainers.tiny_runs import MakeRun, finish, metrics_lines, read_summary, start
from tests.waiting import HANG_S, wait_until
from trainers.core.options import load
from trainers.data.augment import normaliser
from trainers.data.pack import open_pack
from trainers.distributed.process_group import Node, Ranks
from trainers.models import ImageShape, build
from trainers.training.evaluation import Evaluator
from trainers.training.session import run

SETTINGS = {"trainer__epochs": 30, "trainer__checkpoint_every_steps": 3}


def kill_tree(pid: int) -> None:
    """SIGKILL for a launch and its ranks: what a lost node looks like."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def test_two_ranks_train_evaluate_exactly_and_survive_a_kill(make_run: MakeRun) -> None:
    whole, broken = make_run("whole", **SETTINGS), make_run("broken", **SETTINGS)
    out, err = finish(start(whole, ranks=2))
    assert "2 ranks on 1 node: cpu, gloo, fp32; batch 12 (6 a rank), 5 steps an epoch, 150 steps" in out
    assert "Traceback" not in err
    wanted = read_summary(whole)
    assert (wanted["state"], wanted["world_size"], wanted["nnodes"], wanted["steps"]) == ("FINISHED", 2, 1, 150)
    check_evaluation_alone(whole, wanted["metrics"]["test/accuracy"])

    process = start(broken, ranks=2)
    wait_for_step(broken, 8)
    kill_tree(process.pid)
    process.communicate(timeout=HANG_S)
    assert not (broken / "summary.json").exists()
    call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", broken)
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
    node = Node(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    scale = normaliser(pack.manifest, normalise=True, device=node.device)
    alone = Evaluator(model=model, pack=pack, node=node, normalise=scale, precision="fp32", batch_size=6).evaluate(
        "test"
    )
    assert (alone.accuracy, alone.count) == (accuracy, 17)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_follow_the_same_path_as_one(make_run: MakeRun, accumulate: int) -> None:
    settings = {"model__dropout": 0.0, "trainer__log_every_steps": 1}
    alone = make_run("alone", **settings)
    pair = make_run("pair", trainer__accumulate_steps=accumulate, **settings)
    run(alone / "config.json")
    call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", pair)
    losses = [
        [line["metrics"]["train/loss"] for line in metrics_lines(run_dir) if "train/loss" in line["metrics"]]
        for run_dir in (alone, pair)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_rank_that_cannot_start_says_why_once(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__global_batch_size=9)
    process = start(run_dir, ranks=2)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    text = "paceline: error: trainer.global_batch_size=9 does not divide among 2 ranks; nearest good values: 8, 10"
    assert err.count(text) == 1
