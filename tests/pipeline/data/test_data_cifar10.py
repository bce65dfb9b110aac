from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file
from pipeline.data.datasets import cifar10
from pipeline.data.sources.download import DownloadRequest
from pipeline.data.store import fetch
from tests.pipeline.data.data_fixtures import MadeSet, archive_of, make_cifar10, offer, python2_pickle, read_pack
from tests.pipeline.data.data_server import Server
from trainers.core.config import DatasetConfig


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MadeSet, MadeSet]:
    return make_cifar10(tmp_path / "source", monkeypatch)


def config(source: Path | str | None, **sizes: Any) -> DatasetConfig:
    return DatasetConfig(name="cifar10", source=None if source is None else str(source), **sizes)


def check_images(made: MadeSet, data_dir: Path, source: Path | str | None) -> None:
    """Without val and hold-out the pack is the official images in the official order."""
    pack = fetch(config(source), data_dir)
    images, labels = read_pack(pack.path, cifar10.SHAPE)
    np.testing.assert_array_equal(images, np.concatenate([made.train[0], made.test[0]]))
    np.testing.assert_array_equal(labels, np.concatenate([made.train[1], made.test[1]]))


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("form", ["tar.gz", "zip"])
def test_archives_of_both_layouts(made: tuple[MadeSet, MadeSet], tmp_path: Path, layout: int, form: str) -> None:
    folder = made[layout].folder
    if form == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "set"), "zip", folder.parent, folder.name))
    else:
        path = archive_of(folder, tmp_path / "set.tar.gz")
    check_images(made[layout], tmp_path / "data", path)


def test_download_of_the_official_archive(
    made: tuple[MadeSet, MadeSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, refused_url: str
) -> None:
    archive = archive_of(made[1].folder, tmp_path / "cifar-10-python.tar.gz")
    server.script.files[archive.name] = archive.read_bytes()
    urls = (refused_url + archive.name, server.url + archive.name)
    offer(monkeypatch, cifar10, DownloadRequest(name=archive.name, urls=urls, sha256=sha256_file(archive)))
    check_images(made[1], tmp_path / "data", None)
    fetch(config(None, val_size=5), tmp_path / "data")
    assert len(server.script.seen) == 1, "a kept and verified download is used again"


@pytest.mark.slow
def test_the_same_images_as_torchvision_reads(
    made: tuple[MadeSet, MadeSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *args: True)
    for train, split in ((True, "train"), (False, "test")):
        theirs = torchvision.datasets.CIFAR10(str(made[1].folder.parent), train=train)
        for source in made:
            pack = fetch(config(source.folder), tmp_path / "data")
            images, labels = read_pack(pack.path, cifar10.SHAPE)
            ours = slice(*pack.manifest.splits[split])
            np.testing.assert_array_equal(images[ours].transpose(0, 2, 3, 1), theirs.data)
            assert labels[ours].tolist() == theirs.targets
            assert list(pack.manifest.classes) == theirs.classes


def test_a_missing_test_batch_is_named_and_a_holdout_suggested(made: tuple[MadeSet, MadeSet], tmp_path: Path) -> None:
    shutil.rmtree(made[1].folder)
    (made[0].folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch.bin is missing in .*\n  try: dataset.holdout=5000"):
        fetch(config(made[0].folder.parent), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*cifar10-*"))


def test_train_batches_are_enough_with_a_holdout(made: tuple[MadeSet, MadeSet], tmp_path: Path) -> None:
    (made[0].folder / "test_batch.bin").unlink()
    pack = fetch(config(made[0].folder, holdout=30), tmp_path / "data")
    assert pack.manifest.splits == {"train": (0, 70), "val": (70, 70), "test": (70, 100)}
    images, _ = read_pack(pack.path, cifar10.SHAPE)
    assert sorted(map(bytes, images)) == sorted(map(bytes, made[0].train[0]))


def test_an_empty_folder_says_what_is_wanted(made: tuple[MadeSet, MadeSet], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"none of its files is in .*empty; wanted: data_batch_1.bin, .*data_batch_1, "):
        fetch(config(tmp_path / "empty"), tmp_path / "data")


@pytest.mark.parametrize("layout", [0, 1])
def test_an_altered_file_is_named_with_both_digests(made: tuple[MadeSet, MadeSet], tmp_path: Path, layout: int) -> None:
    path = sorted(made[layout].folder.glob("data_batch_2*"))[0]
    wanted = sha256_file(path)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name} is altered: expected sha256 {wanted}, seen {sha256_file(path)}"):
        fetch(config(made[layout].folder), tmp_path / "data")


def test_a_truncated_file_is_named_with_both_sizes(made: tuple[MadeSet, MadeSet], tmp_path: Path) -> None:
    path = made[0].folder / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"data_batch_5.bin is truncated: expected 61460 bytes, seen 61450"):
        fetch(config(made[0].folder), tmp_path / "data")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_a_pickle_with_a_wrong_checksum_is_never_opened(
    made: tuple[MadeSet, MadeSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made[1].folder / "data_batch_1"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "burst")).ljust(path.stat().st_size, b"\0"))
    monkeypatch.setattr(cifar10, "_read_python", lambda path: pytest.fail("unpickled"))
    with pytest.raises(DataError, match=r"data_batch_1 is altered"):
        fetch(config(made[1].folder), tmp_path / "data")
    assert not (tmp_path / "burst").exists()


def test_even_a_trusted_pickle_rebuilds_nothing_but_arrays(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Bomb(tmp_path / "burst"), "labels": []}))
    with pytest.raises(DataError, match=r"it asks for .*, which is not part of an array"):
        list(cifar10._read_python(path))
    assert not (tmp_path / "burst").exists()


def test_pickles_of_new_numpy_are_read_too(tmp_path: Path) -> None:
    data = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for content in (pickle.dumps({"data": data, "labels": [3, 4]}, 4), python2_pickle(data, [3, 4])):
        (tmp_path / "batch").write_bytes(content)
        ((images, labels),) = cifar10._read_python(tmp_path / "batch")
        assert bytes(images) == data.tobytes()
        assert labels == [3, 4]


def test_an_archive_cut_off_is_an_error(made: tuple[MadeSet, MadeSet], tmp_path: Path) -> None:
    path = archive_of(made[0].folder, tmp_path / "set.tar.gz")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"set.tar.gz is damaged"):
        fetch(config(path), tmp_path / "data")


@pytest.mark.ci
@pytest.mark.long
def test_the_real_training_batches(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "cifar10"
    with pytest.raises(DataError, match=r"test_batch.bin is missing"):
        fetch(config(source), tmp_path / "data")
    pack = fetch(config(source, holdout=5000, val_size=5000), tmp_path / "data")
    assert pack.manifest.splits == {"train": (0, 40_000), "val": (40_000, 45_000), "test": (45_000, 50_000)}
    assert pack.digest == "2af4d7e6392162927706dc6b6836860a4e8c2c9a6709cf9df80b0839cec0e86d"
