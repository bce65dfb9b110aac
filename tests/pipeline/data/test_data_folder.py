from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.data.datasets.folder import FolderConfig
from pipeline.data.store import fetch, find
from tests.pipeline.data.data_fixtures import make_folder, read_pack
from tests.pipeline.data.data_server import Server
from tests.s3_fixture import BUCKET
from trainers.core.config import ConfigError


def config(root: Path, **settings: Any) -> FolderConfig:
    return FolderConfig(source=str(root), **{"holdout": 4, **settings})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", 10)


def test_small_images_of_one_size_keep_it_and_classes_are_the_folders_in_order(root: Path, tmp_path: Path) -> None:
    pack = fetch(config(root), tmp_path / "data")
    made = pack.manifest
    assert (made.channels, made.height, made.width, made.classes) == (3, 6, 7, ("cat", "dog"))
    images, labels = read_pack(pack.path, (3, 6, 7))
    names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(10)]
    kept = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    wanted = {np.asarray(Image.open(root / name)).transpose(2, 0, 1).tobytes(): name[:3] == "dog" for name in names}
    assert kept == wanted


def test_other_images_become_squares_of_224_and_of_any_size_asked_for(root: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 30)).save(root / "cat" / "wide.jpg")
    made = fetch(config(root), tmp_path / "data").manifest
    assert (made.height, made.width, made.count) == (224, 224, 21)
    made = fetch(config(root, image_size=[8, 12], channels=1), tmp_path / "data").manifest
    assert (made.channels, made.height, made.width) == (1, 8, 12)


def test_grey_images_have_one_channel_unless_all_aren_t_grey(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L", (5, 5), number).save(tmp_path / name / f"{number}.png")
    assert fetch(config(tmp_path, holdout=1), tmp_path / ".data").manifest.channels == 1
    assert fetch(config(tmp_path, holdout=1, channels=3), tmp_path / ".data").manifest.channels == 3
    Image.new("RGB", (5, 5), "red").save(tmp_path / "a" / "colour.webp", lossless=True)
    assert fetch(config(tmp_path, holdout=1), tmp_path / ".data").manifest.channels == 3


def test_folders_train_val_and_test_are_the_splits(root: Path, tmp_path: Path) -> None:
    for split, count in (("train", 6), ("valid", 3), ("test", 2)):
        make_folder(tmp_path / "split" / split, count)
    made = fetch(config(tmp_path / "split", holdout=0), tmp_path / "data").manifest
    assert made.splits == {"train": (0, 12), "val": (12, 18), "test": (18, 22)}
    with pytest.raises(
        DataError, match=r"has 6 val images of its own, and dataset.val_size=2 .*\n  try: dataset.val_s"
    ):
        fetch(config(tmp_path / "split", holdout=0, val_size=2), tmp_path / "data")


def test_without_a_test_folder_the_val_folder_is_the_test_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / split, 3)
    made = fetch(config(tmp_path, holdout=0, val_size=1), tmp_path / ".data").manifest
    assert made.splits == {"train": (0, 5), "val": (5, 6), "test": (6, 12)}
    assert "the test split is their val folder" in made.source


def test_an_image_in_another_class_is_another_pack_though_no_byte_has_changed(root: Path, tmp_path: Path) -> None:
    first = fetch(config(root), tmp_path / "data")
    assert find(config(root), tmp_path / "data") == first
    (root / "cat" / "9.png").rename(root / "dog" / "00.png")
    assert find(config(root), tmp_path / "data") is None
    assert fetch(config(root), tmp_path / "data").digest != first.digest


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_archives_give_the_digest_of_the_folder(root: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"photos.{kind}"
    (root / "readme.txt").write_text("left out")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as bundle:
            for file in root.rglob("*.*"):
                bundle.write(file, f"photos/{file.relative_to(root)}")
    else:
        with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as tar:
            tar.add(root, "photos")
    assert fetch(config(path), tmp_path / "one").digest == fetch(config(root), tmp_path / "two").digest


def test_an_archive_behind_an_address(root: Path, tmp_path: Path, server: Server) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(root, "photos")
    server.script.files["photos.tar"] = (tmp_path / "photos.tar").read_bytes()
    got = fetch(FolderConfig(source=f"{server.url}photos.tar", holdout=4), tmp_path / "one")
    assert got.digest == fetch(config(root), tmp_path / "two").digest
    with pytest.raises(
        DataError, match=r"is neither a folder nor an archive \(.*\); a web server has no list.*\n  try: dataset.sou"
    ):
        fetch(FolderConfig(source=f"{server.url}photos"), tmp_path / "one")


@pytest.fixture(params=["memory", "s3"])
def bucket(root: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a bucket that holds what ``root`` does in ``photos``, and a note."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    store = fsspec.filesystem(request.param)
    store.put(f"{root}/", f"/{BUCKET}/photos/", recursive=True)
    store.pipe(f"/{BUCKET}/photos/cat/README.txt", b"mine")
    yield f"{request.param}://{BUCKET}"
    store.rm(f"/{BUCKET}/photos", recursive=True)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_a_folder_behind_an_address_gives_the_digest_of_the_folder(root: Path, tmp_path: Path, bucket: str) -> None:
    made = fetch(config(root), tmp_path / "here").manifest
    again = fetch(FolderConfig(source=f"{bucket}/photos", holdout=4), tmp_path / "there")
    assert again.manifest.digest == made.digest
    assert find(FolderConfig(source=f"{bucket}/photos", holdout=4), tmp_path / "there") is not None
    with pytest.raises(DataError, match=rf"dataset.source={bucket}/other holds none of .jpg, "):
        fetch(FolderConfig(source=f"{bucket}/other", holdout=4), tmp_path / "there")
    assert len(list((tmp_path / "there").glob("*folder-*"))) == 1


def no_class(root: Path) -> None:
    for name in ("cat", "dog"):
        for path in (root / name).iterdir():
            path.unlink()
        (root / name).rmdir()


def one_class(root: Path) -> None:
    (root / "dog").rename(root.parent / "away")


def no_image(root: Path) -> None:
    (root / "empty").mkdir()


def loose(root: Path) -> None:
    (root / "1.jpg").write_bytes(b"x")


def other_kind(root: Path) -> None:
    (root / "cat" / "1.tiff").write_bytes(b"x")


def nowhere(root: Path) -> None:
    (root / "cat" / "x.jpg").symlink_to(root / "absent")


def control(root: Path) -> None:
    (root / "dog").rename(root / "d\nog")


def fifo(root: Path) -> None:
    os.mkfifo(root / "cat" / "pipe.jpg")


def no_train(root: Path) -> None:
    (root / "cat").rename(root / "val")


def stranger(root: Path) -> None:
    make_folder(root / "test", 2, classes=("cat", "bird"))
    (root / "train").mkdir()
    for name in ("cat", "dog"):
        (root / name).rename(root / "train" / name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (no_class, r"has no class: it holds no folder; wanted: two classes at least\n  try: .*cat/1.jpg and dog/1.jpg"),
        (one_class, "has one class, 'cat'; wanted: two classes at least"),
        (no_image, "the class 'empty' has no training image"),
        (loose, "1.jpg in .*photos: in no class's folder"),
        (other_kind, r"cat/1.tiff is of a kind that isn't read; kinds: .jpg, .*\n  try: convert it"),
        (nowhere, "cat/x.jpg is no file, or a link that leads nowhere"),
        (control, r"photos: the class 'd\\nog' has a control character in its name\n  try: rename it"),
        (fifo, "cat/pipe.jpg is no file, or a link that leads nowhere"),
        (no_train, "has val and no train/"),
        (stranger, "test/ has bird, which train/ hasn't; classes: cat, dog"),
    ],
)  # fmt: skip
def test_a_folder_that_can_t_be_taken_is_told_before_anything_is_read(
    root: Path, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    change(root)
    with pytest.raises(DataError, match=text):
        fetch(config(root), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*folder-*"))


def test_images_that_can_t_be_read_are_all_named_and_nothing_is_left(root: Path, tmp_path: Path) -> None:
    (root / "cat" / "0.png").write_bytes(b"")
    (root / "dog" / "3.png").write_bytes(b"no image at all")
    with pytest.raises(DataError) as raised:
        fetch(config(root), tmp_path / "data")
    assert str(raised.value) == (
        f"{root}: 2 of 20 images can't be read: cat/0.png: it is empty (0 bytes); "
        "dog/3.png: its 15 bytes are no JPEG, PNG, WEBP or BMP image\n"
        "  try: put good copies in their place, or take them out"
    )
    assert not list((tmp_path / "data").glob("*folder-*"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_is_cut_off_is_named(root: Path, tmp_path: Path, kind: str) -> None:
    content = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(content, kind)
    (root / "dog" / "4.png").write_bytes(content.getvalue()[:-1000])
    with pytest.raises(DataError, match=r"dog/4.png: (it is broken or cut off \(|OSError: )"):
        fetch(config(root), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*folder-*"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"image_size": 0}, r"dataset.image_size=0 must be a number of pixels, as in dataset.image_size=224"),
        ({"image_size": "large"}, "dataset.image_size='large' must be a number"),
        ({"channels": 2}, "dataset.channels=2 must be 1"),
        ({"resize": 256}, "dataset.resize=256 needs dataset.image_size"),
        ({"resize": 200, "image_size": 224}, "dataset.resize=200 must be at least 224"),
        ({"decoded_limit": -1.0}, "dataset.decoded_limit=-1.0 must be at least 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FolderConfig(source="x", **settings)


def test_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset=folder needs your images\n  try: dataset.source=<a folder with one"):
        fetch(FolderConfig(), tmp_path)
    with pytest.raises(DataError, match="absent does not exist"):
        fetch(config(tmp_path / "absent"), tmp_path)
