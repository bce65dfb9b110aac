"""model=torchvision: names read without importing it, networks that fit the data, and what can't be."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from pipeline.keys.import_closure import import_closure
from tests.trainers.tiny_runs import ROOT, config
from trainers.core.config import ConfigError, TrainConfig
from trainers.core.options import parse
from trainers.models import ImageShape, build
from trainers.models.torchvision import TorchvisionConfig


def image(pixels: int, channels: int = 3) -> ImageShape:
    return ImageShape(channels=channels, height=pixels, width=pixels, num_classes=7)


def configured(**settings: object) -> TrainConfig:
    return parse(config({"model": {"name": "torchvision", **settings}}))


def test_the_names_are_those_that_torchvision_lists() -> None:
    from torchvision import models

    assert TorchvisionConfig()._names() == sorted(models.list_models(models))


def test_another_name_or_a_reserved_argument_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model.arch='resnet19' is no classifier of torchvision.models; did you mean"
    ):
        configured(arch="resnet19")
    with pytest.raises(ConfigError, match=r"model.args.weights is not for you to set; take init.weights"):
        configured(args={"weights": "DEFAULT"})


def test_where_torchvision_is_not_installed_any_name_is_left_to_the_hosts_which_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(
        ConfigError, match=r"needs torchvision on host .* install it there: .*pip install.* torchvision"
    ):
        build(configured(arch="newest").model, image(32))


@pytest.mark.parametrize("arch", ["resnet18", "squeezenet1_1", "googlenet"])
def test_a_network_fits_classes_and_channels_of_the_data_and_has_one_output(arch: str) -> None:
    network = build(TorchvisionConfig(arch=arch), image(32, channels=1))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert not [name for name in network.state_dict() if name.startswith("aux")]


def test_arguments_reach_the_builder_and_one_that_it_lacks_is_told() -> None:
    network = build(TorchvisionConfig(arch="squeezenet1_1", args={"dropout": 0.125}), image(32))
    assert [item.p for item in network.modules() if isinstance(item, torch.nn.Dropout)] == [0.125]
    with pytest.raises(ConfigError, match=r"model.arch=squeezenet1_1 refuses model.args=\{'droput': 1\} .*droput"):
        build(TorchvisionConfig(arch="squeezenet1_1", args={"droput": 1}), image(32))


def test_images_that_are_too_small_are_refused() -> None:
    said = "model.arch=alexnet can't take images of 32×32 pixels (torchvision says: "
    with pytest.raises(ConfigError, match=re.escape(said)):
        build(TorchvisionConfig(arch="alexnet"), image(32))
    with pytest.raises(ConfigError, match="takes images of 3 channels, or of 1 as three equal ones; the data has 4"):
        build(TorchvisionConfig(), image(32, channels=4))


def test_its_version_counts_for_runs_with_it_alone(tmp_path: Path) -> None:
    with_it = import_closure(ROOT, ("trainers.classifier", "trainers.models.torchvision"))
    assert "torchvision" in with_it.versions
    assert "torchvision" not in import_closure(ROOT, ("trainers.classifier", "trainers.models.resnet18")).versions
