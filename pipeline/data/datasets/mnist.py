"""MNIST (LeCun, Cortes & Burges): 70,000 grey digits of 28×28, as idx files, gzipped or plain."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from pipeline.data.base import Part, RawSet, Workspace, images_per_block
from pipeline.data.sources import official
from pipeline.data.sources.download import DownloadRequest
from pipeline.data.sources.official import Catalogue, OfficialFile, PublishedLayout
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.base import Block

SHAPE = (1, 28, 28)
_FOLDERS = ("MNIST/raw", "raw", "mnist")  # the layouts of torchvision and others
_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_LABELS_OFFSET = 8  # bytes; a magic number and the count come first


def _layout(title: str, *rows: tuple[str, int, str]) -> PublishedLayout:
    """Make a layout of rows of (file name, size in bytes, sha256): two training files, then the test files."""
    files = tuple(OfficialFile(name=name, size_bytes=size, sha256=sha) for name, size, sha in rows)
    return PublishedLayout(title=title, folders=_FOLDERS, train=files[:2], test=files[2:])


GZIPPED = _layout(
    "gzipped idx files",
    ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
PLAIN = _layout(
    "plain idx files",
    ("train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    ("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    ("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
CATALOGUE = Catalogue(
    layouts=(GZIPPED, PLAIN),
    downloads=tuple(
        DownloadRequest(name=file.name, urls=tuple(f"{mirror}{file.name}" for mirror in _MIRRORS), sha256=file.sha256)
        for file in (*GZIPPED.train, *GZIPPED.test)
    ),
    holdout=10_000,
)


@dataclass(kw_only=True)
class MnistConfig(DatasetConfig):
    """Nothing more to set."""

    name: str = "mnist"


def local_inputs(config: DatasetConfig) -> list[Path]:
    return official.local_inputs(config, CATALOGUE)


def load(config: DatasetConfig, work: Workspace) -> RawSet:
    collected = official.collect(config, CATALOGUE, work)
    layout = collected.layout
    return RawSet(
        train=_part(*collected.paths(layout.train)),
        test=None if config.holdout else _part(*collected.paths(layout.test)),
        shape=SHAPE,
        classes=tuple("0123456789"),
        source=f"MNIST, official files, {layout.title}",
        origin=collected.origin,
        source_files=collected.source_files,
    )


def _part(images: Path, labels: Path) -> Part:
    with _opened(images) as file:
        count = _shape(file)[0]
    return Part(count=count, blocks=lambda: _read_idx(images, labels))


def _read_idx(images: Path, labels: Path) -> Iterator[Block]:
    """Read both files of a part block by block. Their checksums were verified."""
    with _opened(images) as image_file, _opened(labels) as label_file:
        count, height, width = _shape(image_file)
        label_file.seek(_LABELS_OFFSET)
        step = images_per_block((1, height, width))
        for begin in range(0, count, step):
            size = min(step, count - begin)
            yield image_file.read(size * height * width), list(label_file.read(size))


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _shape(file: BinaryIO) -> tuple[int, int, int]:
    """Read the header of an idx file of images: a magic number, then count, height and width, big-endian."""
    _, count, height, width = struct.unpack(">4I", file.read(16))
    return count, height, width
