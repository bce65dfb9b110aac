"""Images in folders, one a class, as torchvision's ImageFolder has them: JPEG, PNG, WebP or BMP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from pipeline.data import class_folders, images, source_folder
from pipeline.data.base import RawSet, Workspace
from pipeline.data.image_settings import ImageFilesConfig
from trainers.core.config import DatasetConfig

_WANTED = "a folder with one folder a class, an archive of it, or an s3:// address"


@dataclass(kw_only=True)
class FolderConfig(ImageFilesConfig):
    """A folder with one folder a class, or with train/, val/ and test/ of them; or an archive of it."""

    name: str = "folder"


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
