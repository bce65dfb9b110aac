"""A model, optimizer, loss, augmentation and metrics of one's own in a training of one rank."""

from __future__ import annotations

import importlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainers.test_resume import die_and_go_on
from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary, write_pack
from trainers.core.config import ConfigError, DatasetConfig
from trainers.data.augment import normaliser, own_augmentation, plan_epoch, training_batch
from trainers.data.pack import open_pack
from trainers.training.session import run

PARTS = """
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, image_size, width=8, bad=None):
        super().__init__()
        self.first = nn.LazyLinear(width)
        self.last = nn.Linear(width, num_classes + (bad == "shape"))
        self.bad = bad

    def forward(self, images):
        if self.bad == "raises":
            raise RuntimeError("a person's mistake")
        if self.bad == "nothing":
            return None
        logits = self.last(torch.relu(self.first(images.flatten(1))))
        return self.requires_grad_(False) and logits if self.bad == "frozen" else logits


class Drawing(Net):
    def __init__(self, num_classes, image_size):
        super().__init__(num_classes, image_size)
        self.scale = nn.Parameter(torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]))

    def forward(self, images):
        return super().forward(images * self.scale.sum() + random.gauss(0, 1) + np.random.randn())


class Speckle(nn.Module):
    def forward(self, image):
        return image // 2 + random.randrange(2) + torch.from_numpy(np.random.randint(0, 9, image.shape, dtype=np.uint8))


def net(num_classes):
    return "no network"


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0, beta=0.5):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for item in group["params"]:
                state = self.state[item]
                state["mean"] = state.get("mean", torch.zeros_like(item)) * group["beta"] + item.grad
                item.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["mean"], alpha=group["lr"])


def focal(logits, labels, gamma=1.0):
    chosen = logits.log_softmax(1).gather(1, labels[:, None])
    return (-((1 - chosen.exp()) ** gamma) * chosen).mean()


class Focal(nn.Module):
    def __init__(self, gamma, num_classes):
        super().__init__()
        self.gamma, self.count = gamma, num_classes

    def forward(self, logits, labels):
        assert logits.shape[1] == self.count
        return focal(logits, labels, self.gamma)


def each(logits, labels):
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def top2(logits, labels):
    return (logits.topk(2).indices == labels[:, None]).any(1)


def mean(logits, labels):
    return logits.mean()


class Noise(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, image):
        assert image.shape == (1, 8, 8)
        return (image // 2 + torch.randint(self.most, image.shape) + random.randrange(2)).to(torch.uint8)


def darker(images, seeds, by=2):
    return torch.where((seeds % 2 == 0)[:, None, None, None], images // by, images)


def floats(image):
    return image / 255
"""
MODEL = {"name": "own", "target": "my_parts:Net", "args": {"width": 6}}


@pytest.fixture(autouse=True)
def my_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    importlib.invalidate_caches()


def test_all_five_train_and_go_on_to_the_bit(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = {"name": "own", "target": "my_parts:Momentum", "lr": 0.05, "args": {"beta": 0.9}, "weight_decay": 0.1}
    settings = {
        "model": MODEL,
        "optimizer": {**optimizer, "decay_bias_and_norm": False},
        "dataset__augmentation": "my_parts:Noise",
        "dataset__augmentation_args": {"most": 9},
        "trainer__loss": "my_parts:focal",
        "trainer__loss_args": {"gamma": 2.0},
        "trainer__metrics": {"top2": "my_parts:top2", "each": "my_parts:each"},
    }
    whole, broken = make_run("whole", **settings), make_run("broken", **settings)
    run(whole / "config.json")
    die_and_go_on(broken, monkeypatch)
    summary = read_summary(whole)
    assert read_summary(broken)["weights_sha256"] == summary["weights_sha256"]
    metrics = summary["metrics"]
    assert metrics["val/accuracy"] <= metrics["val/top2"] <= 1
    assert metrics["test/each"] == pytest.approx(metrics["test/loss"])
    val = next(line["metrics"] for line in metrics_lines(whole) if "val/loss" in line["metrics"])
    assert set(val) == {"val/loss", "val/accuracy", "val/top2", "val/each"}
    asclass = make_run("class", **settings)
    raw = json.loads((asclass / "config.json").read_text())
    raw["trainer"]["loss"] = "my_parts:Focal"
    (asclass / "config.json").write_text(json.dumps(raw))
    run(asclass / "config.json")
    assert read_summary(asclass)["weights_sha256"] == summary["weights_sha256"]


def test_python_and_numpy_draw_alike_in_each_run_of_one_seed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": {"name": "own", "target": "my_parts:Drawing"}, "dataset__augmentation": "my_parts:Speckle"}
    whole, broken = make_run("whole", **settings), make_run("broken", **settings)
    random.seed()  # as a fresh process has them
    np.random.seed()
    run(whole / "config.json")
    random.seed()
    np.random.seed()
    die_and_go_on(broken, monkeypatch)
    summaries = [read_summary(run_dir) for run_dir in (whole, broken)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]  # what is drawn in evaluations too
    assert metrics_lines(whole)[0]["metrics"]["train/loss"] == metrics_lines(broken)[0]["metrics"]["train/loss"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": {**MODEL, "args": {"bad": "shape"}}},
         r"my_parts.py:9 Net returned torch.float32 \[2, 4\] for 2 images of 1×8×8; forward must return float "
         r"logits \[2, 3\]: one for each of the 3 classes"),
        ({"model": {**MODEL, "args": {"bad": "nothing"}}}, "Net returned NoneType for 2 images"),
        ({"model": {**MODEL, "args": {"bad": "frozen"}}}, "Net made a network without a parameter that"),
        ({"model": {"name": "own", "target": "my_parts:net"}},
         r"my_parts.py:39 net returned str, and model.target must m"),
        ({"model": {**MODEL, "target": "my_parts:Nett"}}, "my_parts:Nett: my_parts has no class or function Nett"),
        ({"optimizer": {"name": "own", "target": "my_parts:Net"}}, "Net is no class that derives from torch.o"),
        ({"trainer__loss": "my_parts:each"}, r"each returned torch.float32 \[2\] for .* a loss must be a scalar"),
        ({"trainer__loss": "my_parts:Net", "trainer__loss_args": {"image_size": 1}}, "Net has parameters, which no"),
        ({"trainer__metrics": {"mean": "my_parts:mean"}}, r"mean returned torch.float32 \[\] for .* value for each"),
        ({"trainer__metrics": {"loss": "my_parts:each"}}, "trainer.metrics.loss: choose another name"),
        ({"dataset__augmentation": "my_parts:floats"},
         r"floats returned torch.float32 \[1, 8, 8\] for torch.uint8 \[1, 8, 8\]; an augmentation must return"),
        ({"dataset__augmentation_args": {"most": 1}}, "augmentation_args are for an augmentation of your own"),
        ({"trainer__loss_args": {"gamma": 1}}, "trainer.loss_args are for a loss of your own"),
        ({"trainer__loss": "my_parts:focal", "trainer__label_smoothing": 0.1},
         "trainer.label_smoothing belongs to cross-entropy, and trainer.loss=my_parts:focal has its own arguments"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_its_place(make_run: MakeRun, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(make_run(**settings) / "config.json")


@pytest.mark.parametrize(("name", "args"), [("Noise", {"most": 9}), ("darker", {"by": 3}), ("Speckle", {})])
def test_an_image_is_augmented_alike_in_any_batch(tmp_path: Path, name: str, args: dict[str, int]) -> None:
    config = DatasetConfig(name="arrays", augmentation=f"my_parts:{name}", augmentation_args=args, normalise=False)
    pack, device = open_pack(write_pack(tmp_path / "pack")), torch.device("cpu")
    own = own_augmentation(config, pack.manifest, device)
    scale = normaliser(pack.manifest, normalise=False, device=device)

    def images(start: int, count: int, epoch: int = 0) -> Tensor:
        plan = plan_epoch(config, pack, seed=3, epoch=epoch).batch(start, count)
        return training_batch(pack, plan, config, scale, own)[0]

    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    whole = images(0, 12)
    assert torch.get_rng_state().equal(before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert whole.equal(torch.cat([images(0, 4), images(4, 8)]))
    plain = replace(config, augmentation=None, augmentation_args={})
    assert not whole.equal(training_batch(pack, plan_epoch(plain, pack, seed=3, epoch=0).batch(0, 12), plain, scale)[0])
    first = plan_epoch(config, pack, seed=3, epoch=0).index
    again = {int(index): place for place, index in enumerate(plan_epoch(config, pack, seed=3, epoch=1).index)}
    assert not whole.equal(torch.cat([images(again[int(index)], 1, epoch=1) for index in first[:12]]))


def test_an_exception_of_the_network_comes_as_it_is(make_run: MakeRun) -> None:
    with pytest.raises(RuntimeError, match="a person's mistake"):
        run(make_run(model={**MODEL, "args": {"bad": "raises"}}) / "config.json")
