"""A run that its controller prunes: all ranks leave at one boundary, and it can go on later."""

import json
import re
from pathlib import Path

import pytest

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.training.session import run


def train_on_this_rank(run_dir: Path) -> None:
    next_port()
    run(run_dir / "config.json")


def train_on_two_ranks(run_dir: Path) -> str:
    """What rank 0 printed."""
    return call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", run_dir)[0]


def doing(run_dir: Path) -> list[str]:
    """What each line of metrics.jsonl says of what follows it."""
    return [line["doing"] for line in metrics_lines(run_dir)]


@pytest.mark.ci
@pytest.mark.long
def test_two_ranks_leave_at_the_same_epoch_and_the_run_goes_on_from_there(make_run: MakeRun) -> None:
    whole, pruned = make_run("whole"), make_run("pruned")
    (pruned / "prune").touch()
    out = train_on_two_ranks(pruned)
    assert re.search(r"pruned after epoch 1, at step 5 of 15", out)
    told = json.loads((pruned / "pruned.json").read_text())
    assert (told["step"], told["epoch"], sorted(told["metrics"])) == (5, 1, ["val/accuracy", "val/loss"])
    assert [path.name for path in (pruned / "checkpoints").glob("*.pt")] == ["step-00000005.pt"]
    assert not (pruned / "summary.json").exists()
    evaluating, saving = "evaluating on the val split", "saving a checkpoint and ending early"
    assert doing(pruned) == [*["training"] * 2, evaluating, saving]

    (pruned / "prune").unlink()
    out = train_on_two_ranks(pruned)
    assert "resumed from step 5 (epoch 2, 0 steps into it)" in out
    train_on_two_ranks(whole)
    assert read_summary(pruned)["weights_sha256"] == read_summary(whole)["weights_sha256"]
    assert [line["step"] for line in metrics_lines(pruned)] == [line["step"] for line in metrics_lines(whole)]
    last = "saving the last checkpoint and evaluating on the test split"
    assert doing(whole)[:4] == [*["training"] * 2, evaluating, "training"]
    assert doing(whole)[-3:] == [evaluating, last, "writing the results and ending"]


def test_pruned_between_two_checkpoints_writes_one_and_at_the_last_epoch_it_just_finishes(make_run: MakeRun) -> None:
    rare = make_run("rare", trainer__checkpoint_every_epochs=3, trainer__eval_every_epochs=3)
    (rare / "prune").touch()
    run(rare / "config.json")
    assert [path.name for path in (rare / "checkpoints").glob("*.pt")] == ["step-00000005.pt"]
    late = make_run("late", trainer__epochs=1)
    (late / "prune").touch()
    run(late / "config.json")
    assert read_summary(late)["state"] == "FINISHED"
    assert not (late / "pruned.json").exists()
