"""optimizer=airbench_muon as it stands trains the shipped models; the speed run keeps rates of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve
from pipeline.core.places import ROOT
from pipeline.data import store
from trainers.training.session import run


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", ["small_cnn", "whitened_cnn"])
def test_muons_defaults_train_the_quickstart(model: str, tmp_path: Path) -> None:
    width = ["model.width=8"] if model == "whitened_cnn" else []
    words = ("experiment=quickstart", "optimizer=airbench_muon", f"model={model}", *width, "trainer.epochs=5")
    made = build(resolve(compose_config(words)), words, root=ROOT, local_gpus=0)
    (tmp_path / "data").symlink_to(store.fetch(made.train.dataset, tmp_path / "packs").path)
    (tmp_path / "config.json").write_text(json.dumps(made.resolved))
    run(tmp_path / "config.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"]["test/accuracy"] > 0.95


def test_the_speed_run_has_the_rates_it_was_tuned_with() -> None:
    settings = resolve(compose_config(["experiment=cifar10_speedrun"]))["optimizer"]
    assert settings == {
        "name": "airbench_muon",
        "lr": 0.24,
        "weight_decay": 0.004,
        "lr_scaling": "none",
        "decay_bias_and_norm": True,
        "momentum": 0.6,
        "iterations": 3,
        "head_lr": 0.02,
        "bias_lr": 100.0,
        "sgd_momentum": 0.85,
    }
