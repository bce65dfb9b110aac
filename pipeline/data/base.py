"""What a dataset module gives and gets: the only vocabulary that the registry's modules share."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipeline.core.errors import DataError
from pipeline.core.places import ROOT
from pipeline.data.progress import OnProgress
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:  # numpy costs 0.1 s and more: a run that is up to date only asks `find` and never needs it
    import numpy as np
    import numpy.typing as npt

    Images = npt.NDArray[np.uint8]
    Labels = npt.NDArray[np.int64]
    Block = tuple[Images, Labels]
    EncodedBlock = tuple[Block, Sequence["EncodedImage"]]

_BLOCK_BYTES = 16 << 20
_CONTROL = ("Cc", "Zl", "Zp")  # Unicode's categories: line breaks, tabs, escapes


class EncodedImage(NamedTuple):
    """A file as it is: ``name`` says in messages which one it is, wherever its folder lies."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """The official training, val or test images. ``blocks`` gives, each time it is called, all of them in order
    as (uint8 [n, C, H, W], int64 [n]) with n ≥ 1, so that no more than one block need be in memory.

    ``encoded_blocks`` gives them with the n files, for a set that has an encoding."""

    count: int
    blocks: Callable[[], Iterator[Block]]
    encoded_blocks: Callable[[], Iterator[EncodedBlock]] | None = None


@dataclass(frozen=True, kw_only=True)
class RawSet:
    """A data set before it is split and packed. ``source`` says in words what it is and holds no path
    (it counts for the digest); ``origin`` is where the files were; ``source_files`` maps name → sha256.
    ``encoding``: the pack keeps the files, and ranks decode them with these settings into ``shape``."""

    train: Part
    test: Part | None
    shape: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    source: str
    origin: str
    source_files: dict[str, str] = field(default_factory=dict)
    synthetic: bool = False
    val: Part | None = None
    encoding: Mapping[str, int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where a dataset module may write: ``folder`` is removed afterwards, ``downloads`` is kept."""

    folder: Path
    downloads: Path
    report: OnProgress
    root: Path = ROOT


class DatasetModule(Protocol):
    """Both functions are all that the pack builder calls. Neither is called where a good pack exists,
    except ``local_inputs``, which therefore must be quick and import nothing heavy."""

    def local_inputs(self, config: DatasetConfig) -> list[Path] | dict[str, Path]:
        """The local files whose content decides the pack; empty for downloads and generated images. Where their names
        decide too (a class's folder), they are given by name."""
        ...

    def load(self, config: DatasetConfig, work: Workspace) -> RawSet:
        """Get and verify the files. Raises DataError."""
        ...


def images_per_block(shape: tuple[int, int, int]) -> int:
    """How many uint8 images of (C, H, W) make a block of about 16 MiB."""
    channels, height, width = shape
    return max(1, _BLOCK_BYTES // (channels * height * width))


def check_class_names(classes: Sequence[str], origin: str) -> None:
    """Raises DataError: a class's name would break the lines of reports and tables, or two would share one line."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(classes):
        if any(unicodedata.category(character) in _CONTROL for character in name):
            raise DataError(f"{origin}: the class {name!r} has a control character in its name", hint="rename it")
        if not name.strip():
            raise DataError(f"{origin}: class {number} has no name ({name!r})", hint="name it")
        if (first := numbers.setdefault(name, number)) != number:
            raise DataError(f"{origin}: classes {first} and {number} have one name, {name!r}", hint="rename one")


def refuse_source(config: DatasetConfig) -> None:
    """For sets that need no files: a source that would be ignored is an error."""
    if config.source is not None:
        raise DataError(
            f"dataset.source={config.source!r} is of no use to dataset={config.name}: it needs no files",
            hint="leave dataset.source out, or dataset=arrays for your own .npz",
        )
