"""One rank, from the folder to the results, and what a person reads when it cannot work."""

import json
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.core.files import sha256_file
from tests.trainers import other_model
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.checkpoint import weights_digest
from trainers.core.config import ConfigError
from trainers.core.errors import TrainerError
from trainers.data.augment import EpochPlan
from trainers.data.step_plan import Steps
from trainers.training.session import run
from trainers.training.step import Stepper, out_of_memory

FIELDS = {"state", "metrics", "weights_sha256", "steps", "epochs", "nnodes", "world_size", "images_per_s", "train_s"}
FIELDS |= {"first_step_unix_time", "synthetic", "dataset_digest", "device", "backend", "strategy", "torch", "warm_up_s"}
FIELDS |= {"outputs_sha256", "nodes", "precision"}


def test_a_run_leaves_every_result_of_the_contract(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__epochs=10)
    run(run_dir / "config.json")
    summary = read_summary(run_dir)
    assert set(summary) == FIELDS
    assert summary["metrics"]["test/accuracy"] > 0.9
    assert (summary["device"], summary["backend"], summary["epochs"]) == ("cpu", "gloo", 10)
    predictions = json.loads((run_dir / "predictions.json").read_text())
    hits = [a == b for a, b in zip(predictions["targets"], predictions["predictions"], strict=True)]
    assert (predictions["split"], len(hits)) == ("test", 17)
    assert sum(hits) / 17 == summary["metrics"]["test/accuracy"]
    outputs = {
        name: sha256_file(run_dir / name) for name in ("checkpoints/final.pt", "metrics.jsonl", "predictions.json")
    }
    assert summary["outputs_sha256"] == outputs
    names = {name for line in metrics_lines(run_dir) for name in line["metrics"]}
    splits = {f"{split}/{value}" for split in ("val", "test") for value in ("loss", "accuracy")}
    assert names == {"train/loss", "train/images_per_s", "lr"} | splits
    final = json.loads((run_dir / "checkpoints" / "final.json").read_text())
    assert final["weights_sha256"] == summary["weights_sha256"]


def test_the_same_configuration_gives_the_same_weights_and_another_seed_others(make_run: MakeRun) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_dir = make_run(name, seed=seed)
        run(run_dir / "config.json")
        digests.append(read_summary(run_dir)["weights_sha256"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("model", [{"name": "small_cnn", "width": 4}])
def test_bf16_runs(make_run: MakeRun, model: dict[str, object]) -> None:
    run_dir = make_run(model=model, trainer__precision="bf16", trainer__max_steps=2)
    run(run_dir / "config.json")
    weights = torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)
    assert {item.dtype for item in weights.values()} <= {torch.float32, torch.int64}


def test_without_a_val_split_its_metrics_are_left_out(make_run: MakeRun) -> None:
    run_dir = make_run(pack={"val": 0})
    run(run_dir / "config.json")
    assert set(read_summary(run_dir)["metrics"]) == {"test/loss", "test/accuracy"}


def test_synthetic_data_say_at_both_ends_that_accuracy_means_nothing(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(pack={"synthetic": True})
    run(run_dir / "config.json")
    assert capsys.readouterr().out.count("synthetic data: accuracy means nothing") == 2
    assert read_summary(run_dir)["synthetic"] is True


def test_a_loss_that_explodes_stops_the_run_and_leaves_no_result(make_run: MakeRun) -> None:
    run_dir = make_run(optimizer__lr=1e30)
    with pytest.raises(TrainerError, match=r"the training loss is (nan|inf) at step \d+ on rank 0"):
        run(run_dir / "config.json")
    assert not (run_dir / "summary.json").exists()
    assert not list((run_dir / "checkpoints").glob("*"))


def test_an_exploded_loss_names_the_last_good_checkpoint(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepper, "lr", lambda self, step: 1e30 if step >= 8 else 0.01)
    run_dir = make_run(trainer__checkpoint_every_steps=3)
    with pytest.raises(TrainerError, match=r"step \d+ on rank 0; the last good checkpoint is that of step [69]; "):
        run(run_dir / "config.json")
    assert (run_dir / "checkpoints" / "step-00000006.pt").exists()


def test_a_metric_of_an_evaluation_that_is_no_number_is_left_out_and_counted(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"odd": lambda logits, labels: logits.sum(1) * float("nan")}
    monkeypatch.setattr("trainers.training.loss.metrics", lambda *_: odd)
    run_dir = make_run(trainer__keep_best=True, trainer__epochs=2)
    run(run_dir / "config.json")
    summary, last = read_summary(run_dir), metrics_lines(run_dir)[-1]
    assert summary["nonfinite"]["val/odd"] == {"first": "nan", "step": last["step"] // 2, "count": 2}
    assert summary["nonfinite"]["test/odd"]["count"] == 1
    assert not {"val/odd", "test/odd"} & {*summary["metrics"], *last["metrics"]}
    said = "val/odd is nan at step"
    assert capsys.readouterr().out.count(said) == 1


def test_updates_that_are_not_finite_can_be_left_out(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper._backward

    def sometimes_infinite(self: Stepper, part: EpochPlan) -> Tensor:
        loss = original(self, part)
        if poisoned := int(part.index[0]) % 4 == 0:
            gradient = self.optimizer.parameters[0].grad
            assert gradient is not None
            gradient.fill_(float("inf"))
        return loss * float("inf") if poisoned else loss

    monkeypatch.setattr(Stepper, "_backward", sometimes_infinite)
    monkeypatch.setitem(sys.modules, "trainers.models.resnet18", other_model)
    run_dir = make_run(trainer__skip_nonfinite=True, model={"name": "resnet18"}, trainer__epochs=2)
    run(run_dir / "config.json")
    skipped = [line["metrics"].get("train/skipped_steps") for line in metrics_lines(run_dir)]
    assert 0 < max(count for count in skipped if count is not None) < 10
    weights = torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)
    assert all(item.isfinite().all() for item in weights.values())


def test_the_best_weights_of_the_run_are_kept(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__keep_best=True, trainer__epochs=6)
    run(run_dir / "config.json")
    lines = [line for line in metrics_lines(run_dir) if "val/accuracy" in line["metrics"]]
    best = max(lines, key=lambda line: line["metrics"]["val/accuracy"])
    side = json.loads((run_dir / "checkpoints" / "best.json").read_text())
    assert (side["step"], side["val/accuracy"]) == (best["step"], best["metrics"]["val/accuracy"])
    assert weights_digest(torch.load(run_dir / "checkpoints" / "best.pt", weights_only=True)) == side["weights_sha256"]


def test_the_best_of_an_empty_val_split_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(TrainerError, match=r"keep_best=true needs val images, .* set dataset.val_size"):
        run(make_run(pack={"val": 0}, trainer__keep_best=True) / "config.json")


def test_checkpoints_by_the_clock_are_looked_for_when_the_loss_is_logged(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__checkpoint_every_minutes=1e-6, trainer__keep_checkpoints=99)
    run(run_dir / "config.json")
    steps = [int(path.stem[5:]) for path in sorted((run_dir / "checkpoints").glob("step-*.pt"))]
    assert steps == [2, 4, 5, 6, 8, 10, 12, 14, 15]


def test_full_memory_names_the_next_smaller_micro_batch_that_divides() -> None:
    steps = Steps(global_batch_size=36, rank_batch_size=18, accumulate=2, per_epoch=1, total=1)
    assert out_of_memory(steps, 1) == (
        "GPU memory is full on rank 1 with 9 images at once (18 a rank and step); "
        "trainer.accumulate_steps=3 takes 6 at once in the same global batch"
    )
    single = Steps(global_batch_size=2, rank_batch_size=1, accumulate=1, per_epoch=1, total=1)
    assert out_of_memory(single, 0).endswith("with 1 images at once (1 a rank and step); take a smaller model")


def test_weights_of_another_network_are_refused(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run()
    run(run_dir / "config.json")
    monkeypatch.setitem(sys.modules, "trainers.models.small_cnn", other_model)
    with pytest.raises(TrainerError, match=r"step 15 does not fit model=small_cnn .*Missing key.* to start afresh"):
        run(run_dir / "config.json")


def test_an_empty_test_split_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(TrainerError, match=r"the test split of stripes is empty; set dataset.holdout"):
        run(make_run(pack={"test": 0}) / "config.json")


def test_an_altered_data_file_is_refused(make_run: MakeRun) -> None:
    run_dir = make_run()
    path = run_dir / "data" / "images.bin"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])
    with pytest.raises(TrainerError, match=r"images.bin was altered"):
        run(run_dir / "config.json")


def test_one_image_a_rank_is_too_few_for_batch_normalisation(make_run: MakeRun) -> None:
    run_dir = make_run(model={"name": "resnet18"}, trainer__global_batch_size=1)
    with pytest.raises(TrainerError, match="model=resnet18 has batch normalisation, which needs at least 2 images"):
        run(run_dir / "config.json")


def test_an_unknown_field_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.speed is not a field of optimizer=sgd"):
        run(make_run(optimizer__speed=1) / "config.json")


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without a compiler: it captures the graphs and runs them with torch's own operations."""
    compiling = torch.compile

    def compile_(model: nn.Module, *, dynamic: bool, mode: str) -> object:
        assert mode == "default"
        return compiling(model, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer", [pytest.param("sgd", marks=pytest.mark.ci), "adam", "muon", "airbench_muon", "torch"]
)
def test_compiling_changes_neither_weights_nor_names_and_its_time_is_told(
    make_run: MakeRun, eagerly: None, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    settings: dict[str, Any] = {
        "model": {"name": "whitened_cnn", "width": 2},
        "optimizer": {"name": optimizer, "lr": 0.01},
    }
    settings["trainer__accumulate_steps"] = 2
    plain, compiled = make_run("plain", **settings), make_run("compiled", **settings, trainer__compile=True)
    run(plain / "config.json")
    assert "compiled" not in capsys.readouterr().out
    run(compiled / "config.json")
    assert "compiled in" in capsys.readouterr().out
    assert read_summary(compiled)["weights_sha256"] == read_summary(plain)["weights_sha256"]
    assert read_summary(plain)["warm_up_s"] == 0
    assert read_summary(compiled)["warm_up_s"] > 0


@pytest.mark.ci
@pytest.mark.long
def test_a_network_that_cannot_be_compiled_says_what_to_do(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> object:
        def network(_: Tensor) -> Tensor:
            raise RuntimeError("no C++ compiler\n found")

        return network

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(TrainerError, match=r"compiled \(no C\+\+ compiler found\); .*trainer.compile=false"):
        run(make_run(trainer__compile=True) / "config.json")


def test_an_epoch_is_counted_of_those_that_max_steps_leaves(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make_run(trainer__epochs=10, trainer__max_steps=1) / "config.json")
    assert re.search(r"^epoch 1/1  step 1/1  loss ", capsys.readouterr().out, re.MULTILINE)
