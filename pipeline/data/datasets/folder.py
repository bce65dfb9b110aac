"""Images in folders, one a class, as torchvision's ImageFolder has them: JPEG, PNG, WebP or BMP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeline.data import class_folders, images, source_folder
from pipeline.data.base import RawSet, Workspace
from trainers.core.config import DatasetConfig, check_images

_WANTED = "a folder with one folder a class, or an archive of it"


@dataclass(kw_only=True)
class FolderConfig(DatasetConfig):
    """A folder with one folder a class, or with train/, val/ and test/ of them; or an archive of it.

    Attributes:
        image_size: pixels, 224 or [height,width]; the middle of each image is cut out in these proportions and resized.
            null: the size of the images where all have one of at most 224, else 224.
        resize: pixels of the shorter side before image_size is cut out of the middle; null: as many as that has.
        channels: 3 (colour), 1 (grey), or null: grey where all images are.
        decoded_limit: GiB; a pack that would have more pixels keeps the files, and the ranks decode them.
    """

    name: str = "folder"
    image_size: Any = None
    resize: int | None = None
    channels: int | None = None
    decoded_limit: float = 8.0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        check_images(self.image_size, self.resize, self.channels, self.decoded_limit)


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    """Every image by its path, which says its class; or the archive."""
    path = source_folder.local(config, _WANTED)
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return class_folders.find(path, str(path)).files


def load(config: FolderConfig, work: Workspace) -> RawSet:
    """Look at each image; they are decoded while they are packed. Raises DataError."""
    place = source_folder.get(config, work, _WANTED, class_folders.READ)
    found = class_folders.find(place.folder, place.origin)
    val_is_test = "; the test split is their val folder" if found.val_is_test else ""
    source = images.Source(
        parts={name: partial(_items, found.root, part) for name, part in found.parts.items()},
        classes=found.classes,
        text=f"images in one folder a class{val_is_test}",
        origin=place.origin,
    )
    return images.raw_set(source, config, work.report)


def _items(root: Path, part: tuple[tuple[str, int], ...]) -> Iterator[images.Item]:
    for name, label in part:
        yield images.Item(name, partial(_open, root / name), label)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")
