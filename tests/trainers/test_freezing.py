"""trainer.freeze: what a pattern matches stays as it was, on one rank and on several."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.trainers import other_model
from tests.trainers.ranks import call_on_ranks
from tests.trainers.test_sharding import train, weights
from tests.trainers.tiny_runs import MakeRun, config, read_summary
from trainers.core.config import ConfigError
from trainers.core.options import load, parse
from trainers.data.pack import open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training.loop import Trainer
from trainers.training.model_setup import freeze, moving_buffers, training_mode
from trainers.training.session import run

FROZEN = ["features.*"]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))


def fresh(run_dir: Path) -> dict[str, Tensor]:
    """The weights that a run starts from."""
    context = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    return Trainer(load(run_dir / "config.json"), open_pack(run_dir / "data"), context, run_dir).model.state_dict()


def test_a_frozen_normalisation_keeps_its_statistics_and_others_move() -> None:
    model = network()
    freeze(model, ["0.*", "1.*", "2.weight"])
    assert [name for name, item in model.named_parameters() if item.requires_grad] == ["2.bias", "3.weight", "3.bias"]
    training_mode(model, ["0.*", "1.*", "2.weight"])
    before = [item.clone() for item in model.buffers()]
    model(torch.randn(4, 1, 8, 8))
    moved = [not torch.equal(*pair) for pair in zip(model.buffers(), before, strict=True)]
    assert moved == [False] * 3 + [True] * 3
    assert moving_buffers(model, ["1.*"]) == [*model[3].buffers()]  # type: ignore[index]


def test_without_patterns_nothing_is_frozen_and_all_buffers_are_averaged() -> None:
    model = network()
    freeze(model, [])
    training_mode(model, [])
    assert all(item.training for item in model.modules())
    assert all(item.requires_grad for item in model.parameters())
    assert len(moving_buffers(model, [])) == 6


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("1", "'1' matches no parameter of the network; did you mean 1.*?"),
        ("2.wieght", "its names begin with: 0, 1, 2, 3"),
        ("*", "trainer.freeze=[*] leaves nothing to train; take a pattern away that matches the last layer (3.bias)"),
    ],
)
def test_a_pattern_that_can_not_be_meant_is_refused_with_near_names(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        freeze(network(), [pattern])


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.freeze=\[''\] has an empty pattern"):
        parse(config({"trainer.freeze": [""]}))


def test_frozen_weights_do_not_move_and_a_run_that_was_killed_ends_with_the_same_bits(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], trained: Callable[..., None]
) -> None:
    settings = {
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        "trainer__freeze": FROZEN,
        "trainer__ema": 0.5,
        "trainer__checkpoint_every_steps": 2,
    }
    whole, killed = make_run("whole", **settings), make_run("killed", **settings)
    start = fresh(whole)
    run(whole / "config.json")
    assert "small_cnn (915 parameters, 579 of them trained) on" in capsys.readouterr().out
    for name, value in weights(whole).items():
        assert torch.equal(value, start[name]) == name.startswith("features."), name
    last = torch.load(whole / "checkpoints/step-00000015.pt", weights_only=True)
    assert len(last["optimizer"]["SGD.momentum_buffer"]) == len(last["optimizer"]["average"]) == 4
    trained(killed, until=9)
    trained(killed)
    assert read_summary(killed)["weights_sha256"] == read_summary(whole)["weights_sha256"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``train`` in this process, which is in no process group."""
    monkeypatch.setattr("tests.trainers.test_sharding.next_port", lambda: None)
    return train


def train_all(folder: Path) -> None:
    other_model.stand_in("resnet18")
    for name in ("ddp", "fsdp", "shards"):
        train(folder / name)


@pytest.mark.ci
@pytest.mark.long
def test_two_ranks_leave_frozen_weights_and_statistics_as_the_file_has_them(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DistributedDataParallel, in slices, and with trainer.shards."""
    settings = {
        "model": {"name": "resnet18"},
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1},
        "trainer__freeze": ["0.*", "1.*"],
    }
    folders = [make_run("ddp", **settings)]
    folders.append(make_run("fsdp", **settings, strategy={"name": "fsdp"}))
    folders.append(make_run("shards", **settings, trainer__shards=2))
    monkeypatch.setitem(sys.modules, "trainers.models.resnet18", other_model)
    start = {name: value + 1 for name, value in fresh(folders[0]).items()}
    for folder in folders:  # from a file, which rank 0 alone reads
        told = {**json.loads((folder / "config.json").read_text()), "init": {"weights": "w.pt"}}
        (folder / "config.json").write_text(json.dumps(told))
        torch.save(start, folder / "init.pt")
    call_on_ranks("tests.trainers.test_freezing:train_all", tmp_path, groups=3)
    for folder in folders:
        found = weights(folder)
        assert [name for name, value in found.items() if torch.equal(value, start[name])] == [
            *("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")
        ], folder.name
