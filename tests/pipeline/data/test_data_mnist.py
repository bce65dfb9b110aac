from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.datasets import mnist
from pipeline.data.sources.download import DownloadRequest
from pipeline.data.store import fetch
from tests.pipeline.data.data_fixtures import MadeSet, make_mnist, offer, read_pack
from tests.pipeline.data.data_server import Server
from trainers.core.config import DatasetConfig


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSet:
    return make_mnist(tmp_path / "source", monkeypatch)


def config(source: Path | str | None, **sizes: Any) -> DatasetConfig:
    return DatasetConfig(name="mnist", source=None if source is None else str(source), **sizes)


def check_images(made: MadeSet, data_dir: Path, source: Path | str | None) -> None:
    pack = fetch(config(source), data_dir)
    images, labels = read_pack(pack.path, (28, 28))
    np.testing.assert_array_equal(images, np.concatenate([made.train[0], made.test[0]]))
    np.testing.assert_array_equal(labels, np.concatenate([made.train[1], made.test[1]]))


@pytest.mark.parametrize("form", ["gz", "plain"])
def test_gzipped_and_plain_files(made: MadeSet, tmp_path: Path, form: str) -> None:
    check_images(made, tmp_path / "data", made.folder.parent / form)


@pytest.mark.slow
def test_torchvision_s_folder_is_found_and_gives_the_same_images(made: MadeSet, tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    raw = tmp_path / "root" / "MNIST" / "raw"
    raw.parent.mkdir(parents=True)
    raw.symlink_to(made.folder.parent / "plain")
    pack = fetch(config(tmp_path / "root"), tmp_path / "data")
    images, labels = read_pack(pack.path, (28, 28))
    for train, split in ((True, "train"), (False, "test")):
        theirs = torchvision.datasets.MNIST(str(tmp_path / "root"), train=train)
        ours = slice(*pack.manifest.splits[split])
        np.testing.assert_array_equal(images[ours], theirs.data.numpy())
        np.testing.assert_array_equal(labels[ours], theirs.targets.numpy())


def test_download_from_mirrors_and_from_a_folder_s_address(
    made: MadeSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, refused_url: str
) -> None:
    server.script.files = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    layout = mnist.CATALOGUE.layouts[0]
    offer(
        monkeypatch,
        mnist,
        *(
            DownloadRequest(name=file.name, urls=(refused_url + file.name, server.url + file.name), sha256=file.sha256)
            for file in (*layout.train, *layout.test)
        ),
    )
    check_images(made, tmp_path / "mirrors", None)
    check_images(made, tmp_path / "address", server.url)


def test_an_address_without_test_files_suggests_a_holdout(made: MadeSet, tmp_path: Path, server: Server) -> None:
    server.script.files = {path.name: path.read_bytes() for path in made.folder.glob("train-*")}
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz, .* is missing.*\n  try: dataset.holdout=10000"):
        fetch(config(server.url), tmp_path / "data")
    assert fetch(config(server.url, holdout=10), tmp_path / "data").manifest.splits["test"] == (50, 60)


def test_a_holdout_replaces_official_test_images(made: MadeSet, tmp_path: Path) -> None:
    made_pack = fetch(config(made.folder, holdout=10, val_size=5), tmp_path / "data").manifest
    assert made_pack.splits == {"train": (0, 45), "val": (45, 50), "test": (50, 60)}
    assert made_pack.source.endswith("the test split is a hold-out of 10 training images")


def test_the_real_files(shared_data: Path, tmp_path: Path) -> None:
    made = fetch(config(shared_data / "mnist", val_size=12_000), tmp_path / "data").manifest
    assert made.splits == {"train": (0, 48_000), "val": (48_000, 60_000), "test": (60_000, 70_000)}
    assert made.mean[0] == pytest.approx(0.1306, abs=1e-4)
    assert made.std[0] == pytest.approx(0.3080, abs=1e-4)
