"""What holds for the pack of every data set. A new one joins with one line in ``MAKERS``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.core.processes.process import Completed
from pipeline.data import request
from pipeline.data.datasets import DATASETS
from pipeline.data.datasets.folder import FolderConfig
from pipeline.data.datasets.own import OwnDatasetConfig
from pipeline.data.datasets.parquet import ParquetConfig
from pipeline.data.datasets.synthetic import SyntheticConfig
from pipeline.data.datasets.torchvision import TorchvisionDatasetConfig
from pipeline.data.store import fetch, find
from tests.pipeline.data.data_fixtures import (
    make_cifar10,
    make_fashion_mnist,
    make_folder,
    make_mnist,
    make_parquet,
    random_images,
    read_pack,
)
from trainers.core.config import DatasetConfig


def arrays(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    images, labels = random_images(50, (6, 7), 5)
    np.savez(root / "mine.npz", images=images, labels=labels)
    return DatasetConfig(name="arrays", source=str(root / "mine.npz"), holdout=10, val_size=5)


def cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    make_cifar10(root, monkeypatch)
    return DatasetConfig(name="cifar10", source=str(root), val_size=10)


def digits(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return DatasetConfig(name="digits", holdout=360, val_size=180)


def folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return FolderConfig(source=str(make_folder(root, 30)), holdout=10, val_size=5)


def own(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return OwnDatasetConfig(target="tests.pipeline.data.own_data:squares", args={"count": 60}, holdout=20, val_size=5)


def parquet(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return ParquetConfig(source=str(make_parquet(root, train=40, test=10)), val_size=5)


def mnist(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return DatasetConfig(name="mnist", source=str(make_mnist(root, monkeypatch).folder), val_size=12)


def synthetic(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    return SyntheticConfig(size=60, test_size=20, channels=2, image_size=9, val_size=10)


def torchvision(root: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    """Read out in this process: test_data_torchvision.py has the real one, which imports torchvision each time."""
    from pipeline.data.datasets import torchvision as module
    from trainers.data.torchvision_images import main

    def run(argv: list[str], env: object) -> Completed:
        main(json.loads(argv[-1]))
        return Completed(argv=tuple(argv), code=0, stdout="", stderr="")

    monkeypatch.setattr(module, "process", SimpleNamespace(run=run, child_environment=dict))
    return TorchvisionDatasetConfig(class_name="FashionMNIST", source=str(make_fashion_mnist(root)), val_size=6)


MAKERS = (arrays, cifar10, digits, folder, mnist, own, parquet, synthetic, torchvision)
CONFIGS = {make.__name__: make for make in MAKERS}


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConfig:
    source = tmp_path / "source"
    source.mkdir()
    return CONFIGS[request.param](source, monkeypatch)


def test_every_registered_data_set_is_tested_and_has_a_schema() -> None:
    assert sorted(CONFIGS) == DATASETS.names()


@pytest.mark.slow
def test_a_pack_is_what_its_manifest_says(config: DatasetConfig, tmp_path: Path) -> None:
    pack = fetch(config, tmp_path / "data")
    made, raw = pack.manifest, json.loads((pack.path / "manifest.json").read_text())
    assert raw.pop("digest") == pack.digest == sha256_text(canonical_json(raw))
    assert str(tmp_path) not in json.dumps(raw)
    assert {name: sha256_file(pack.path / name) for name in made.sha256} == made.sha256
    images, labels = read_pack(pack.path, (made.channels, made.height, made.width))
    assert len(images) == len(labels) == made.count
    assert len(made.classes) == made.num_classes
    assert set(labels.tolist()) == set(range(made.num_classes))
    train = images[: made.splits["train"][1]].astype(np.float64) / 255
    np.testing.assert_allclose(made.mean, train.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(made.std, train.std(axis=(0, 2, 3)), rtol=1e-9)
    assert made.synthetic == (config.name == "synthetic")
    assert ("means nothing" in made.source) == made.synthetic


@pytest.mark.slow
def test_splits_follow_each_other_and_have_the_sizes_asked_for(config: DatasetConfig, tmp_path: Path) -> None:
    made = fetch(config, tmp_path / "data").manifest
    (zero, a), (b, c), (d, end) = (made.splits[name] for name in ("train", "val", "test"))
    assert (zero, a, c, end) == (0, b, d, made.count)
    assert c - b == config.val_size
    assert end > d
    assert a > 0
    if config.holdout:
        assert end - d == config.holdout
        assert f"hold-out of {config.holdout} training images" in made.source


@pytest.mark.slow
def test_two_folders_get_the_same_pack_and_find_returns_it_whatever_the_nodes_alone_apply(
    config: DatasetConfig, tmp_path: Path
) -> None:
    first, second = fetch(config, tmp_path / "one"), fetch(config, tmp_path / "two")
    assert first.digest == second.digest
    assert first.path.name == second.path.name
    assert find(config, tmp_path / "one") == first
    assert find(replace(config, crop_padding=4, flip=True, normalise=False), tmp_path / "one") == first


@pytest.mark.slow
def test_another_val_size_is_another_pack_with_the_same_test_images(config: DatasetConfig, tmp_path: Path) -> None:
    first, second = (fetch(replace(config, val_size=n), tmp_path / "data") for n in (2, 8))
    assert first.path != second.path
    tails = []
    for pack in (first, second):
        made = pack.manifest
        images, labels = read_pack(pack.path, (made.channels, made.height, made.width))
        begin = made.splits["test"][0]
        tails.append((images[begin:].tobytes(), labels[begin:].tobytes()))
    assert tails[0] == tails[1]


@pytest.mark.parametrize("name", DATASETS.names())
def test_the_code_that_decides_a_pack_is_that_which_reads_and_packs_it(name: str) -> None:
    """Of all that Paceline is: an edit elsewhere would have the data made anew."""
    counted = request._code((DATASETS.target(name), "pipeline.data.packing")).digests
    rooms = {"/".join(path.split("/")[:2]) for path in counted}
    assert rooms <= {"pipeline/core", "pipeline/data", "trainers/core", "trainers/data"}
