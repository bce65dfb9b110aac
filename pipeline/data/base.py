"""The interface between data set modules and the pack builder.

A data set module (``data/datasets/``) describes its images as a RawSet, or as an ImageSource if they are image files.
``packing`` splits a RawSet and writes it as a pack, the form in which the ranks map it into memory.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeline.core.errors import DataError
from pipeline.core.places import ROOT
from pipeline.data.progress import OnProgress
from trainers.core.config import ConfigError, DatasetConfig, at_least, image_sides

if TYPE_CHECKING:  # importing numpy takes 0.1 s or more, and an up-to-date run only calls `find`
    import numpy as np
    import numpy.typing as npt

    Images = npt.NDArray[np.uint8]
    Labels = npt.NDArray[np.int64]
    Block = tuple[Images | bytes, Labels | list[int]]
    EncodedBlock = tuple[Block, Sequence["EncodedImage"]]

_BLOCK_BYTES = 16 << 20
_CONTROL_CATEGORIES = ("Cc", "Zl", "Zp")  # of Unicode: line breaks, tabs, escapes


class EncodedImage(NamedTuple):
    """An image file's bytes; ``name`` identifies it in messages, independent of its folder."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """The training, val or test images of a data set.

    Each call of ``blocks`` yields all of them in order, as pairs of images (uint8 [n, C, H, W], or the bytes of such an
    array) and labels (int64 [n], or a list), n ≥ 1. ``encoded_blocks`` yields each block together with its n image
    files; only a RawSet with an ``encoding`` has it.
    """

    count: int
    blocks: Callable[[], Iterator[Block]]
    encoded_blocks: Callable[[], Iterator[EncodedBlock]] | None = None


@dataclass(frozen=True, kw_only=True)
class RawSet:
    """A data set before it is split and packed."""

    train: Part
    test: Part | None
    shape: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    source: str  # a description without a path, as it counts in the digest
    origin: str  # where the files came from, for messages
    source_files: dict[str, str] = field(default_factory=dict)  # name → sha256
    synthetic: bool = False
    val: Part | None = None
    # if set, the pack keeps the image files, and the ranks decode them: {"resize": pixels of the shorter side, or None}
    encoding: Mapping[str, int | None] | None = None


class ImageItem(NamedTuple):
    """One image; ``name`` appears in messages and in the pack."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


Items = Callable[[], Iterator[ImageItem]]
"""A function that yields all images of a part in order, each time it is called."""


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The images of a data set of image files, before any is opened; ``data.images`` makes a RawSet of it."""

    parts: Mapping[str, Items]  # by split: train, val, test
    classes: tuple[str, ...]
    description: str  # of the source, for the manifest; without a path
    origin: str  # where the files came from, for messages


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What a data set module gets to work with: folders that it may write to, and a function that reports progress."""

    folder: Path  # removed afterwards
    downloads: Path  # kept
    report: OnProgress
    root: Path = ROOT  # of the project


@dataclass(kw_only=True)
class ImageFilesConfig(DatasetConfig):
    """A data set of encoded images (JPEG, PNG, …). These fields say how they are cut, resized and decoded.

    Attributes:
        image_size: pixels, 224 or [height,width]; the middle of each image is cut out in these proportions and resized.
            null: the images' own size if it is the same for all and at most 224, else 224.
        resize: pixels to which the shorter side is resized before image_size is cut out of the middle; null: the
            shorter side of image_size.
        channels: 3 (colour), 1 (grey), or null: grey if all images are grey.
        decoded_limit: GiB; if the decoded pixels are more, the pack keeps the files, and the ranks decode them.
    """

    image_size: Any = None
    resize: int | None = None
    channels: int | None = None
    decoded_limit: float = 8.0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        sides = image_sides("dataset.image_size", self.image_size)
        if self.channels not in (None, 1, 3):
            raise ConfigError(
                f"dataset.channels={self.channels} must be 1 (grey), 3 (colour), or null: what the images have"
            )
        at_least("dataset.decoded_limit", self.decoded_limit, 0)
        if self.resize is not None:
            if sides is None:
                raise ConfigError(
                    f"dataset.resize={self.resize} needs dataset.image_size, which is cut out of the middle then"
                )
            at_least("dataset.resize", self.resize, min(sides))


class DatasetModule(Protocol):
    """The two functions of a data set module. With a valid pack only ``local_inputs`` is called: it must be quick."""

    def local_inputs(self, config: DatasetConfig) -> list[Path] | dict[str, Path]:
        """Return the local files whose content decides the pack; as name → path if their names decide it too."""
        ...

    def load(self, config: DatasetConfig, work: Workspace) -> RawSet | ImageSource:
        """Get and verify the files. A data set of image files returns an ImageSource. Raises DataError."""
        ...


def images_per_block(shape: tuple[int, int, int]) -> int:
    """Return the number of uint8 images of (C, H, W) in a block of about 16 MiB."""
    channels, height, width = shape
    return max(1, _BLOCK_BYTES // (channels * height * width))


def check_class_names(classes: Sequence[str], origin: str) -> None:
    """Refuse class names that break the lines of reports and tables, and duplicates. Raises DataError."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(classes):
        if any(unicodedata.category(character) in _CONTROL_CATEGORIES for character in name):
            raise DataError(f"{origin}: the class {name!r} has a control character in its name", hint="rename it")
        if not name.strip():
            raise DataError(f"{origin}: class {number} has no name ({name!r})", hint="name it")
        if (first := numbers.setdefault(name, number)) != number:
            raise DataError(f"{origin}: classes {first} and {number} have one name, {name!r}", hint="rename one")


def refuse_any_source(config: DatasetConfig) -> None:
    """Refuse a source for data sets without files, because it would be ignored. Raises DataError."""
    if config.source is not None:
        raise DataError(
            f"dataset.source={config.source!r} is of no use to dataset={config.name}: it needs no files",
            hint="leave dataset.source out, or dataset=arrays for your own .npz",
        )
