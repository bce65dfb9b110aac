"""A run that dies anywhere and starts again ends with the same weights, to the bit (one rank, in process)."""

from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.training.loop import Trainer
from trainers.training.session import run


class DiedError(Exception):
    """Stands for SIGKILL inside the process; test_torchrun.py sends the real one."""


def die_at(monkeypatch: pytest.MonkeyPatch, step: int, method: str) -> None:
    original = getattr(Trainer, method)

    def dying(self: Trainer, *arguments: object, **named: object) -> object:
        if self.step == step:
            raise DiedError
        return original(self, *arguments, **named)

    monkeypatch.setattr(Trainer, method, dying)


@pytest.mark.parametrize(
    ("optimizer", "method", "accumulate", "more"),
    [
        ("sgd", "_one_step", 2, {}),
        pytest.param("sgd", "_validate", 1, {}, marks=pytest.mark.long),
        pytest.param("sgd", "_save", 1, {}, marks=pytest.mark.long),
        ("adamw", "_log", 3, {"clip_norm": 0.5, "ema": 0.8, "patience": 1, "class_weights": "balanced"}),
        pytest.param("adamw", "_save", 1, {"ema": 0.8, "patience": 1, "keep_best": True}, marks=pytest.mark.long),
    ],
)
def test_dying_at_any_step_changes_nothing(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    method: str,
    accumulate: int,
    more: dict[str, object],
) -> None:
    settings: dict[str, object] = {"trainer__checkpoint_every_steps": 3, "optimizer": {"name": optimizer, "lr": 0.01}}
    settings |= {f"trainer__{name}": value for name, value in more.items()}
    settings["trainer__accumulate_steps"] = accumulate
    whole = make_run("whole", **settings)
    run(whole / "config.json")
    wanted = read_summary(whole)
    assert wanted["steps"] == (10 if method == "_log" else 15)  # patience ends that run early
    for step in range(1, wanted["steps"]):
        broken = make_run(f"broken{step}", **settings)
        with monkeypatch.context() as patch:
            die_at(patch, step, method)
            try:
                run(broken / "config.json")
            except DiedError:
                run_again(broken, patch)
        assert read_summary(broken)["weights_sha256"] == wanted["weights_sha256"], step
        assert [line["step"] for line in metrics_lines(broken)] == [line["step"] for line in metrics_lines(whole)]


def die_and_go_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the eighth step, then again to the end."""
    with monkeypatch.context() as patch:
        die_at(patch, 8, "_one_step")
        with pytest.raises(DiedError):
            run(run_dir / "config.json")
    run(run_dir / "config.json")


def run_again(run_dir: Path, patch: pytest.MonkeyPatch) -> None:
    patch.undo()
    run(run_dir / "config.json")


def test_a_torn_newest_checkpoint_is_skipped_with_a_warning(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    run(run_dir / "config.json")
    before = read_summary(run_dir)
    newest = run_dir / "checkpoints" / "step-00000015.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    run(run_dir / "config.json")
    out = capsys.readouterr().out
    assert "warning: checkpoint step-00000015.pt is skipped" in out
    assert "resumed from step 10 (epoch 3, 0 steps into it)" in out
    assert read_summary(run_dir)["weights_sha256"] == before["weights_sha256"]


@pytest.mark.parametrize("line", [3, -1])  # one that the checkpoint knows, one after it
def test_a_line_of_nuls_in_the_metrics_costs_nothing(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: int
) -> None:
    whole, broken = make_run("whole"), make_run("broken")
    run(whole / "config.json")
    with monkeypatch.context() as patch:
        die_at(patch, 14, "_one_step")
        with pytest.raises(DiedError):
            run(broken / "config.json")
    path = broken / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = b"\0" * 500 + b"\n"
    path.write_bytes(b"".join(lines))
    capsys.readouterr()
    run(broken / "config.json")
    assert ("warning: metrics.jsonl was damaged" in capsys.readouterr().out) == (line == 3)
    assert without_clock(broken) == without_clock(whole)
    assert read_summary(broken)["weights_sha256"] == read_summary(whole)["weights_sha256"]


def without_clock(run_dir: Path) -> list[tuple[object, ...]]:
    """The lines of metrics.jsonl but for what the time decides."""
    rows = metrics_lines(run_dir)
    for row in rows:
        row["metrics"].pop("train/images_per_s", None)
    return [(row["step"], row["epoch"], row["metrics"]) for row in rows]


def test_a_finished_run_called_again_writes_the_same_summary(make_run: MakeRun) -> None:
    run_dir = make_run()
    run(run_dir / "config.json")
    before = read_summary(run_dir)
    run(run_dir / "config.json")
    again = read_summary(run_dir)
    for summary in (before, again):  # the test's line has the time of its own evaluation
        summary["outputs_sha256"].pop("metrics.jsonl")
    assert again == before


@pytest.mark.parametrize("optimizer", ["airbench_muon", "muon", "torch"])
def test_a_whitened_network_goes_on_with_its_filters(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    settings: dict[str, object] = {"model": {"name": "whitened_cnn", "width": 2}, "trainer__tta": "multicrop"}
    settings |= {"optimizer": {"name": optimizer}, "schedule": {"name": "triangle"}}
    whole, broken = make_run("whole", **settings), make_run("broken", **settings)
    run(whole / "config.json")
    die_and_go_on(broken, monkeypatch)
    assert read_summary(broken)["weights_sha256"] == read_summary(whole)["weights_sha256"]
    filters = torch.load(whole / "checkpoints" / "final.pt", weights_only=True)["whitening.convolution.weight"]
    assert filters.abs().max() > 1.5  # far from fresh ones, which are below 0.5
