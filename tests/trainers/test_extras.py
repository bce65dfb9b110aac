"""Clipping, weight averages, early stopping, class weights: torch's own, and in a run from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.trainers.tiny_runs import MakeRun, config, metrics_lines, read_summary, write_pack
from trainers.core.config import ConfigError, TrainerConfig
from trainers.core.errors import TrainerError
from trainers.core.options import load, parse
from trainers.data.pack import MappedPack, open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training import loss
from trainers.training.loop import Trainer
from trainers.training.model_setup import make_network
from trainers.training.session import run
from trainers.training.step import GradScaler, WeightAverage

CPU = torch.device("cpu")


def trainer_of(run_dir: Path, scaler: Callable[[], GradScaler | None] = lambda: None) -> Trainer:
    """Ready for its first step."""
    trainer = Trainer(
        load(run_dir / "config.json"),
        open_pack(run_dir / "data"),
        RankContext(ranks=Ranks(), device=CPU, backend="gloo"),
        run_dir,
    )
    trainer.stepper.grad_scaler = scaler()
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("scales", [False, True])
def test_the_norm_is_that_of_the_whole_unscaled_gradient(make_run: MakeRun, accumulate: int, *, scales: bool) -> None:
    settings = {"model__dropout": 0.0, "trainer__accumulate_steps": accumulate, "trainer__clip_norm": 0.01}
    trainer = trainer_of(make_run(**settings), lambda: GradScaler([], CPU, scales=True) if scales else None)
    trainer.stepper(trainer.plan(0, 0), 0, 0)
    norm, parameters = trainer.stepper.norm, list(trainer.model.parameters())
    assert norm is not None
    plain = trainer_of(make_run("plain", model__dropout=0.0))
    plain.stepper(plain.plan(0, 0), 0, 0)
    whole = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
    assert float(norm) == pytest.approx(float(whole), rel=1e-4)
    assert float(whole) > 0.1
    for found, wanted in zip(parameters, plain.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-7)


def test_the_average_is_torchs_and_is_put_in_place_and_taken_back_to_the_bit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average = WeightAverage([*model.parameters()], 0.7)
    for step in range(5):
        with torch.no_grad():
            for item in model.parameters():
                item.add_(torch.randn(item.shape))
        reference.update_parameters(model)
        average.update(step)
    before, wanted = [item.clone() for item in model.parameters()], [*reference.module.parameters()]
    with average.in_place():
        assert all(map(torch.equal, model.parameters(), wanted))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(map(torch.equal, average.values, wanted))


def test_the_run_is_judged_by_averaged_weights_and_saves_them(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__ema=0.9, trainer__keep_best=True)
    run(run_dir / "config.json")
    folder = run_dir / "checkpoints"
    last = torch.load(folder / "step-00000015.pt", weights_only=True)
    final = torch.load(folder / "final.pt", weights_only=True)
    assert all(map(torch.equal, final.values(), last["optimizer"]["average"]))
    assert not any(map(torch.equal, final.values(), last["model"].values()))
    best = json.loads((folder / "best.json").read_text())
    if best["step"] == 15:
        assert best["weights_sha256"] == read_summary(run_dir)["weights_sha256"]


def test_a_run_ends_once_the_val_split_has_not_got_better_and_once_more_changes_nothing(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(trainer__epochs=30, trainer__patience=2, trainer__checkpoint_every_epochs=30)
    run(run_dir / "config.json")
    summary, out = read_summary(run_dir), capsys.readouterr().out
    seen = [line["metrics"]["val/accuracy"] for line in metrics_lines(run_dir) if "val/accuracy" in line["metrics"]]
    assert len(seen) == summary["epochs"] == summary["steps"] / 5 < 30
    assert max(seen[-2:]) <= max(seen[:-2]) == seen[-3]
    assert f"ended early: val accuracy has not risen above {seen[-3]:.4f} in 2 evaluations (trainer.patience=2)" in out
    (run_dir / "summary.json").unlink()
    run(run_dir / "config.json")
    assert f"resumed from step {summary['steps']} " in capsys.readouterr().out
    assert read_summary(run_dir)["weights_sha256"] == summary["weights_sha256"]


def test_patience_without_a_val_split_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(TrainerError, match=r"trainer.patience=2 needs val images.*set dataset.val_size"):
        run(make_run(pack={"val": 0}, trainer__patience=2) / "config.json")


def pack_of(folder: Path) -> MappedPack:
    return open_pack(write_pack(folder))


def test_class_weights_are_1_on_average_and_add_up_over_ranks(tmp_path: Path) -> None:
    pack = pack_of(tmp_path)
    labels = pack.labels[slice(*pack.manifest.splits["train"])]
    weights = loss.class_weights("balanced", pack)
    torch.testing.assert_close(weights, 60 / (3 * torch.bincount(labels, minlength=3).float()))
    assert float(loss.class_weights([1.0, 5.0, 0.0], pack)[labels].mean()) == pytest.approx(1.0)
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    value = loss.build(TrainerConfig(class_weights="balanced", label_smoothing=0.1), pack, CPU)
    halves = (value(logits[:30], labels[:30]) + value(logits[30:], labels[30:])) / 2
    torch.testing.assert_close(value(logits, labels), halves)
    torchs = nn.functional.cross_entropy(logits, labels, weights, label_smoothing=0.1)
    torch.testing.assert_close(value(logits, labels), torchs)  # over all of the train split they divide alike


def test_class_weights_that_do_not_fit_the_data_are_refused(tmp_path: Path) -> None:
    pack = pack_of(tmp_path)
    with pytest.raises(TrainerError, match="class_weights has 2 weights, and stripes has 3 classes"):
        loss.class_weights([1.0, 2.0], pack)
    pack = replace(pack, labels=torch.where(pack.labels == 1, 0, pack.labels))
    with pytest.raises(TrainerError, match=r"balanced: the train split has no image of class 1 .*; give a list of 3"):
        loss.class_weights("balanced", pack)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.class_weights": "even"}, "class_weights='even' must be balanced, or a list"),
        ({"trainer.class_weights": [1, -1]}, r"class_weights=\[1, -1\] must be"),
        ({"trainer.class_weights": [0, 0]}, r"class_weights=\[0, 0\] must be"),
        ({"trainer.ema": 1.0}, r"trainer.ema=1.0 must lie in \[0, 1\)"),
        ({"trainer.clip_norm": -1.0}, "trainer.clip_norm=-1.0 must be at least 0"),
        ({"trainer.patience": 0}, "trainer.patience=0 must be at least 1"),
        ({"trainer.sync_batchnorm": True, "trainer.shards": 2}, "take trainer.sync_batchnorm=false, or trainer.shards"),
    ],
)
def test_values_that_cannot_work_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(config(settings))


def test_batch_normalisation_over_ranks_needs_gpus(make_run: MakeRun) -> None:
    run_dir = make_run(trainer__sync_batchnorm=True)
    settings, pack = load(run_dir / "config.json"), open_pack(run_dir / "data")
    steps = trainer_of(run_dir).steps  # one rank has nobody to share with
    context = RankContext(ranks=Ranks(world_size=2), device=CPU, backend="gloo")
    with pytest.raises(TrainerError, match=r"sync_batchnorm=true needs GPUs: torch.nn.SyncBatchNorm has no form for"):
        make_network(settings, pack.manifest, context, steps)
