from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.overrides.words import for_hydra
from pipeline.core.errors import DataError
from pipeline.data.datasets.torchvision import TorchvisionDatasetConfig
from pipeline.data.store import fetch
from tests.pipeline.data.data_fixtures import make_fashion_mnist, random_images, read_pack
from trainers.core.config import ConfigError


@pytest.mark.ci
@pytest.mark.long
def test_its_images_parts_and_names_of_classes_are_packed(tmp_path: Path) -> None:
    config = TorchvisionDatasetConfig(class_name="FashionMNIST", source=str(make_fashion_mnist(tmp_path / "root")))
    pack = fetch(config, tmp_path / "data")
    made = pack.manifest
    assert (made.channels, made.height, made.width, made.splits["test"]) == (1, 28, 28, (30, 50))
    assert made.classes[:2] == ("T-shirt/top", "Trouser")
    np.testing.assert_array_equal(read_pack(pack.path, (28, 28))[0][:30], random_images(30, (28, 28), 0)[0])


@pytest.mark.long  # two processes that import torchvision; a pack made of a class: the test above
def test_a_class_that_isn_t_there_and_one_whose_files_aren_t(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"torchvision.datasets has no FashionMnist; did you mean FashionMNIST\?"):
        fetch(TorchvisionDatasetConfig(class_name="FashionMnist", source=str(tmp_path)), tmp_path / "data")
    with pytest.raises(DataError, match="KMNIST can't be read: RuntimeError: Dataset not found"):
        fetch(TorchvisionDatasetConfig(class_name="KMNIST", source=str(tmp_path)), tmp_path / "data")
    assert not list((tmp_path / "data").glob("torchvision-*"))


def test_the_class_is_named_as_people_say_it() -> None:
    assert for_hydra(["dataset.class=SVHN", "seed=1"]) == ["dataset.class_name=SVHN", "seed=1"]
    with pytest.raises(ConfigError, match=r"dataset.class= must name a class of torchvision"):
        TorchvisionDatasetConfig()
