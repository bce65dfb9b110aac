from __future__ import annotations

import gzip
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.datasets import digits
from pipeline.data.datasets.synthetic import SyntheticConfig
from pipeline.data.store import fetch
from tests.pipeline.data.data_fixtures import random_images, read_pack
from tests.pipeline.data.data_server import Server
from trainers.core.config import DatasetConfig

IMAGES, LABELS = random_images(40, (6, 7, 3), 1)


def save(folder: Path, **arrays: Any) -> DatasetConfig:
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return DatasetConfig(name="arrays", source=str(path), holdout=0 if len(arrays) > 3 else 10)


def packed(config: DatasetConfig, folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    pack = fetch(config, folder / "data")
    assert (pack.manifest.channels, pack.manifest.height, pack.manifest.width) == shape
    return read_pack(pack.path, shape)[0]


TWO = {"test_images": IMAGES[:10], "test_labels": LABELS[:10]}


@pytest.mark.slow
def test_channels_last_and_first_give_the_same_pack(tmp_path: Path) -> None:
    last = packed(save(tmp_path, images=IMAGES, labels=LABELS, **TWO), tmp_path, (3, 6, 7))
    np.testing.assert_array_equal(last, np.concatenate([IMAGES, IMAGES[:10]]).transpose(0, 3, 1, 2))
    turned = {"images": IMAGES.transpose(0, 3, 1, 2), "test_images": IMAGES[:10].transpose(0, 3, 1, 2)}
    config = save(tmp_path, labels=LABELS, test_labels=LABELS[:10], **turned)
    np.testing.assert_array_equal(packed(config, tmp_path, (3, 6, 7)), last)


def test_without_a_channel_axis_there_is_one_channel(tmp_path: Path) -> None:
    grey = {"images": IMAGES[..., 0], "test_images": IMAGES[:10, ..., 0]}
    images = packed(save(tmp_path, labels=LABELS, test_labels=LABELS[:10], **grey), tmp_path, (1, 6, 7))
    np.testing.assert_array_equal(images[:40, 0], IMAGES[..., 0])


def test_keras_s_names_and_label_columns(tmp_path: Path) -> None:
    config = save(
        tmp_path, x_train=IMAGES, y_train=LABELS[:, None].astype("u1"), x_test=IMAGES[:5], y_test=LABELS[:5, None]
    )
    assert len(packed(config, tmp_path, (3, 6, 7))) == 45


def test_layout_decides_where_the_shape_does_not(tmp_path: Path) -> None:
    images = IMAGES[:, :3]  # [N, 3, 7, 3]
    config = save(tmp_path, images=images, labels=LABELS)
    with pytest.raises(DataError, match=r"images has shape \(40, 3, 7, 3\), which does not tell where the channels"):
        fetch(config, tmp_path / "data")
    config = save(tmp_path, images=images, labels=LABELS, layout="NHWC")
    assert packed(config, tmp_path, (3, 3, 7)).shape == (40, 3, 3, 7)
    with pytest.raises(DataError, match="layout is 'HWCN'; wanted: 'NHWC' or 'NCHW'"):
        fetch(save(tmp_path, images=images, labels=LABELS, layout="HWCN"), tmp_path / "data")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"images": IMAGES.astype("f4")}, r"mine.npz: images is float32; wanted: uint8"),
        ({"images": IMAGES[0]}, r"images has 6 images, labels 40; wanted: as many"),
        ({"images": IMAGES[..., None]}, r"images has shape \(40, 6, 7, 3, 1\); wanted: \[N, H, W\]"),
        ({"images": IMAGES.reshape(40, -1)}, r"images has shape \(40, 126\); wanted"),
        ({"images": IMAGES[:, :0]}, r"images has shape \(40, 0, 7, 3\); wanted"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "images is empty"),
        ({"images": np.array([None, "x"], dtype=object)}, "images holds Python objects"),
        ({"labels": LABELS.astype(object)}, "labels holds Python objects"),
        ({"labels": np.where(LABELS == 3, np.nan, LABELS)}, "labels is float64; wanted: integers"),
        ({"labels": LABELS[:-1]}, "images has 40 images, labels 39; wanted: as many"),
        ({"labels": LABELS - 1}, "labels holds -1; wanted: class numbers from 0"),
        ({"labels": np.where(LABELS == 3, 4, LABELS)},
         r"labels go up to 9 but no image has 3; wanted: 0 … K−1, no gaps\n  try: labels = numpy.unique\("),
        ({"labels": np.where(LABELS == 3, 2**40, LABELS)}, "labels holds 1099511627776; wanted"),
        ({"labels": np.where(LABELS == 3, 10**6, LABELS)}, "labels go up to 1000000 but no image has 3, 10, 11"),
        ({"labels": np.stack([LABELS, LABELS], 1)}, r"labels has shape \(40, 2\); wanted: \[N\]"),
        ({**TWO, "test_labels": LABELS[:10] + 5}, "test labels go up to 14, training labels to 9"),
        ({**TWO, "test_images": IMAGES[:10, :5]}, r"test_images are \(3, 5, 7\) .* images \(3, 6, 7\); wanted: equal"),
        ({"test_images": IMAGES[:10]}, "has no array test_labels; it has: images, labels, test_images"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_named_with_what_is_wanted(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        fetch(save(tmp_path, **{"images": IMAGES, "labels": LABELS, **arrays}), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*arrays-*"))


def test_other_names_are_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the arrays pictures; wanted: images and labels"):
        fetch(save(tmp_path, pictures=IMAGES), tmp_path / "data")


@pytest.mark.parametrize("cut", [10, 3000])
def test_a_file_cut_off(tmp_path: Path, cut: int) -> None:
    config = save(tmp_path, images=IMAGES, labels=LABELS)
    path = tmp_path / "mine.npz"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"mine.npz is not a .npz file, or it is cut off"):
        fetch(config, tmp_path / "data")


def test_a_damaged_member_is_found_by_its_checksum(tmp_path: Path) -> None:
    config = save(tmp_path, images=IMAGES, labels=LABELS)
    path = tmp_path / "mine.npz"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine.npz: images is damaged: Bad CRC-32"):
        fetch(config, tmp_path / "data")


def test_from_an_http_address(tmp_path: Path, server: Server) -> None:
    save(tmp_path, images=IMAGES, labels=LABELS)
    server.script.files["mine.npz"] = (tmp_path / "mine.npz").read_bytes()
    config = DatasetConfig(name="arrays", source=f"{server.url}mine.npz?token=secret", holdout=10)
    pack = fetch(config, tmp_path / "data")
    assert pack.manifest.count == 40
    assert "secret" not in (pack.path / "stamps.json").read_text()
    del server.script.files["mine.npz"]
    with pytest.raises(DataError, match=r"mine.npz: HTTP 404 Not Found\n  try: .*dataset=digits") as raised:
        fetch(DatasetConfig(name="arrays", source=config.source, holdout=11), tmp_path / "data")
    assert "secret" not in str(raised.value)


@pytest.mark.slow
def test_digits_are_scikit_learn_s(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    ((pixels, labels),) = digits.load(digits.DigitsConfig(holdout=360), None).train.blocks()  # type: ignore[arg-type]
    assert isinstance(pixels, bytes)
    np.testing.assert_array_equal(
        np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 8, 8), np.floor(theirs.images * 255 / 16 + 0.5)
    )
    np.testing.assert_array_equal(labels, theirs.target)


def test_altered_digits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.csv.gz").write_bytes(gzip.compress(b"0,1\n"))
    monkeypatch.setattr(digits, "_table", lambda: tmp_path / "digits.csv.gz")
    with pytest.raises(DataError, match=r"digits.csv.gz is altered: expected sha256 6ebb3d2f"):
        fetch(digits.DigitsConfig(holdout=360), tmp_path / "data")


def test_synthetic_classes_can_be_told_apart_and_another_seed_is_another_set(tmp_path: Path) -> None:
    config = SyntheticConfig(size=400, test_size=200)
    pack = fetch(config, tmp_path / "data")
    images, labels = (part.astype(np.float64) for part in read_pack(pack.path, (3, 32, 32)))
    means = np.stack([images[:400][labels[:400] == label].mean(axis=0) for label in range(10)])
    nearest = np.array([((means - image) ** 2).sum(axis=(1, 2, 3)).argmin() for image in images[400:]])
    assert (nearest == labels[400:]).mean() > 0.99
    assert fetch(SyntheticConfig(size=400, test_size=200, generator_seed=1), tmp_path / "data").digest != pack.digest


def npy(header: bytes, values: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + values


def described(shape: str, descr: str = "|u1", fortran: str = "False") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}}}\n".encode()


def archive(path: Path, images: bytes, labels: bytes, method: int = zipfile.ZIP_DEFLATED) -> DatasetConfig:
    with zipfile.ZipFile(path / "mine.npz", "w", method) as bundle:
        bundle.writestr("images.npy", images)
        bundle.writestr("labels.npy", labels)
    return DatasetConfig(name="arrays", source=str(path / "mine.npz"), holdout=1)


IMAGES_NPY, LABELS_NPY = npy(described("(4, 2, 2)"), bytes(16)), npy(described("(4,)", "<i8"), bytes(32))


@pytest.mark.parametrize("which", ["images", "labels"])
@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x93NUMPY",
        npy(b"\xff" * 40),
        npy(b"(" * 5000),
        npy(b"-" * 5000 + b"1"),
        npy(b"{'descr': '|u1', 'fortran_order': False}"),
        npy(described("(1000000000000,)", "<i8"), bytes(32)),
        npy(described("(1000000000000, 1, 1)"), bytes(32)),
        npy(described("(4, 4611686018427387904, 4)"), bytes(32)),
        npy(described("(-4, 2, 2)"), bytes(16)),
        npy(described("(4, 2, 2)", "nonsense"), bytes(16)),
        npy(described("(4, 2, 2)", "O"), bytes(128)),
        npy(described("(4, 2, 2)"), bytes(9)),
        b"\x93NUMPY\x09\x00" + bytes(60),
    ],
)
def test_a_broken_header_is_one_clear_line(tmp_path: Path, which: str, broken: bytes) -> None:
    parts = {"images": IMAGES_NPY, "labels": LABELS_NPY, which: broken}
    with pytest.raises(DataError, match=rf"mine.npz: {which} (is damaged|holds Python objects|has|is) ?") as caught:
        fetch(archive(tmp_path, parts["images"], parts["labels"]), tmp_path / "data")
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 400


def test_labels_may_be_big_endian_and_lie_in_fortran_order(tmp_path: Path) -> None:
    plain = packed(save(tmp_path, images=IMAGES, labels=LABELS, **TWO), tmp_path, (3, 6, 7))
    columns = np.asfortranarray(LABELS.astype(">i4")[:, None])
    config = save(tmp_path, images=np.asfortranarray(IMAGES), labels=columns, **TWO)
    pack = fetch(config, tmp_path / "data")
    assert np.fromfile(pack.path / "labels.bin", "<i8").tolist()[:40] == LABELS.tolist()
    np.testing.assert_array_equal(packed(config, tmp_path, (3, 6, 7)), plain)
