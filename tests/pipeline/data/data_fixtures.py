"""Small files in the official formats, made by code, whose digests take the place of the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.data.datasets import cifar10, mnist
from pipeline.data.sources.download import DownloadRequest
from pipeline.data.sources.official import OfficialFile, PublishedLayout

BATCH = 20  # images in each made CIFAR-10 batch


@dataclass(frozen=True)
class MadeSet:
    """What was written: folder of the files, and the images in the order of the files."""

    folder: Path
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def random_images(count: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images, np.arange(count, dtype=np.int64) % 10


def official(path: Path) -> OfficialFile:
    content = path.read_bytes()
    return OfficialFile(name=path.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def describe(layout: PublishedLayout, folder: Path) -> PublishedLayout:
    """The layout with sizes and digests of the files that lie in ``folder``."""
    made = [tuple(official(folder / file.name) for file in part) for part in (layout.train, layout.test)]
    return replace(layout, train=made[0], test=made[1])


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A protocol 2 pickle as Python 2 with an old numpy wrote it: byte strings and ``numpy.core``."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    shape = b"(" + b"".join(map(number, data.shape)) + b"t"
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    items = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def make_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MadeSet, MadeSet]:
    """Both layouts of the same images below ``root``: (binary, Python)."""
    train, test = random_images(5 * BATCH, cifar10.SHAPE, 1), random_images(BATCH, cifar10.SHAPE, 2)
    binary, python = root / "cifar-10-batches-bin", root / "cifar-10-batches-py"
    binary.mkdir(parents=True)
    python.mkdir()
    for number in range(6):
        images, labels = (part[number * BATCH : (number + 1) * BATCH] for part in train) if number < 5 else test
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        flat = images.reshape(BATCH, -1)
        (binary / f"{name}.bin").write_bytes(np.c_[labels.astype(np.uint8), flat].tobytes())
        (python / name).write_bytes(python2_pickle(flat, labels.tolist()))
    (python / "batches.meta").write_bytes(pickle.dumps({"label_names": list(cifar10.CLASSES)}, 2))
    layouts = (describe(cifar10.BINARY, binary), describe(cifar10.PYTHON, python))
    monkeypatch.setattr(cifar10, "_BATCH", BATCH)
    monkeypatch.setattr(cifar10, "CATALOGUE", replace(cifar10.CATALOGUE, layouts=layouts))
    return MadeSet(binary, train, test), MadeSet(python, train, test)


def make_mnist(root: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSet:
    """Gzipped and plain idx files in one folder each; the gzipped one is returned."""
    train, test = random_images(60, (28, 28), 3), random_images(20, (28, 28), 4)
    gzipped, plain = root / "gz", root / "plain"
    gzipped.mkdir(parents=True)
    plain.mkdir()
    for prefix, (images, labels) in (("train", train), ("t10k", test)):
        head = struct.pack(">IIII", 0x0803, len(images), 28, 28)
        for name, content in (
            (f"{prefix}-images-idx3-ubyte", head + images.tobytes()),
            (f"{prefix}-labels-idx1-ubyte", struct.pack(">II", 0x0801, len(labels)) + labels.astype("u1").tobytes()),
        ):
            (plain / name).write_bytes(content)
            (gzipped / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    layouts = (describe(mnist.GZIPPED, gzipped), describe(mnist.PLAIN, plain))
    monkeypatch.setattr(mnist, "CATALOGUE", replace(mnist.CATALOGUE, layouts=layouts))
    return MadeSet(gzipped, train, test)


def make_folder(
    root: Path, count: int, size: tuple[int, int] = (6, 7), classes: Sequence[str] = ("cat", "dog")
) -> Path:
    """``count`` PNGs of random pixels in each class's folder below ``root``."""
    for number, name in enumerate(classes):
        images, _ = random_images(count, (*size, 3), number)
        (root / name).mkdir(parents=True)
        for index, image in enumerate(images):
            Image.fromarray(image).save(root / name / f"{index}.png")
    return root


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def make_parquet(root: Path, **counts: int) -> Path:
    """Two shards a split, laid out as hubs do it: struct<bytes, path>, and the names of three classes in the schema."""
    features = {"image": {"_type": "Image"}, "label": {"names": ["red", "green", "blue"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    (root / "data").mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(counts.items()):
        images, _ = random_images(count, (6, 7, 3), seed)
        rows = [{"bytes": png(image), "path": f"{number}.png"} for number, image in enumerate(images)]
        table = pa.table({"image": rows, "label": [number % 3 for number in range(count)]})
        for shard in range(2):
            part = table.slice(shard * (count // 2), count if shard else count // 2).replace_schema_metadata(metadata)
            pq.write_table(part, root / "data" / f"{split}-{shard:05}-of-00002.parquet", row_group_size=7)
    return root


def make_fashion_mnist(root: Path) -> Path:
    """The root of torchvision's FashionMNIST, with few images."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for seed, (prefix, count) in enumerate((("train", 30), ("t10k", 20))):
        images, labels = random_images(count, (28, 28), seed)
        head = struct.pack(">IIII", 0x0803, count, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">II", 0x0801, count)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.astype("u1").tobytes())
    return root


def offer(monkeypatch: pytest.MonkeyPatch, module: object, *downloads: DownloadRequest) -> None:
    """Replace the official addresses of a dataset module."""
    monkeypatch.setattr(module, "CATALOGUE", replace(module.CATALOGUE, downloads=downloads))  # type: ignore[attr-defined]


def archive_of(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    return path


def read_pack(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    images = np.fromfile(path / "images.bin", dtype=np.uint8).reshape(-1, *shape)
    return images, np.fromfile(path / "labels.bin", dtype="<i8")
