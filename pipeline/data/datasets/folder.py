"""``dataset=folder``: image files in one folder per class, as in torchvision's ImageFolder (JPEG, PNG, WebP or BMP)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from pipeline.core.errors import DataError
from pipeline.core.tables import first_of
from pipeline.data.base import ImageFilesConfig, ImageItem, ImageSource, Workspace, check_class_names
from pipeline.data.sources import folder
from trainers.core.config import DatasetConfig

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp")
_OTHER_IMAGE_SUFFIXES = (
    *(".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl"),
    *(".ppm", ".pgm", ".pbm", ".svg", ".psd"),
)
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_MOST_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class ClassFolders:
    """The image files of a data set by split and class, sorted."""

    root: Path
    classes: tuple[str, ...]
    parts: Mapping[str, tuple[tuple[str, int], ...]]  # train, val, test → pairs (path below root, class number)
    val_is_test: bool  # there is no test/, so the images of val/ are the test split

    @property
    def files(self) -> dict[str, Path]:
        """All images by their paths below the root."""
        return {name: self.root / name for part in self.parts.values() for name, _ in part}


def find_class_folders(folder: Path, source: str) -> ClassFolders:
    """Find ``CLASS/…``, or ``train/CLASS/…`` with optional ``val/`` (``valid/``, ``validation/``) and ``test/``.

    ``source`` names the folder in messages. Raises DataError: an image or folder is elsewhere; OSError.
    """
    root = _below_single(folder)
    # split → name of its folder; without such folders all images are training images
    splits = {_SPLITS[name.lower()]: name for name in _folders(root, source) if name.lower() in _SPLITS}
    if splits and "train" not in splits:
        raise DataError(
            f"{source} has {first_of([*splits.values()], _MOST_LISTED)} and no train/",
            hint="put the training images into train/CLASS/; or rename what is a class",
        )
    names = splits or {"train": ""}
    classes = _classes(root / names["train"], source, names["train"])
    parts = {part: _part(root, name, classes, source) for part, name in names.items()}
    trained = {label for _, label in parts["train"]}
    for number, name in enumerate(classes):
        if number not in trained:
            raise DataError(f"{source}: the class {name!r} has no training image", hint=_layout_hint(names["train"]))
    val_is_test = "val" in parts and "test" not in parts
    if val_is_test:
        parts["test"] = parts.pop("val")
    return ClassFolders(root=root, classes=tuple(classes), parts=parts, val_is_test=val_is_test)


def _below_single(folder: Path) -> Path:
    """Descend while a folder contains only one folder, as an unpacked archive does (``images-1.0/cat/1.jpg``)."""
    while True:
        entries = [item for item in os.scandir(folder) if not item.name.startswith((".", "__MACOSX"))]
        if len(entries) != 1 or not entries[0].is_dir() or entries[0].name.lower() in _SPLITS:
            return folder
        # if the only folder holds no folders, it is a class, and the error says that one class is too few
        inner = Path(entries[0].path)
        if not any(item.is_dir() for item in os.scandir(inner)) or inner.is_symlink():
            return folder
        folder = inner


def _folders(folder: Path, source: str) -> list[str]:
    """Return the names of the folders in ``folder``. Raises DataError: there are images beside them."""
    entries = [item for item in os.scandir(folder) if not item.name.startswith((".", "__MACOSX"))]
    loose = sorted(item.name for item in entries if _is_image(item.name) and not item.is_dir())
    if loose:
        raise DataError(
            f"{source}: {first_of(loose, _MOST_LISTED)} in {folder}: in no class's folder",
            hint="one folder a class: CLASS/IMAGE.jpg",
        )
    return sorted(item.name for item in entries if item.is_dir())


def _classes(folder: Path, source: str, split: str) -> list[str]:
    classes = _folders(folder, source)
    if len(classes) < 2:
        seen = f"one class, {classes[0]!r}" if classes else "no class: it holds no folder"
        raise DataError(f"{source} has {seen}; wanted: two classes at least", hint=_layout_hint(split))
    check_class_names(classes, source)
    return classes


def _layout_hint(split: str) -> str:
    prefix = f"{split}/" if split else ""
    return f"one folder a class, as in {prefix}cat/1.jpg and {prefix}dog/1.jpg"


def _part(root: Path, split: str, classes: list[str], source: str) -> tuple[tuple[str, int], ...]:
    """Return (path below ``root``, class number) of the images in the folder of a split. Raises DataError, OSError."""
    class_folders = _folders(root / split, source)
    unexpected = [name for name in class_folders if name not in classes]
    if unexpected:
        raise DataError(
            f"{source}: {split}/ has {first_of(unexpected, _MOST_LISTED)}, which train/ hasn't; "
            f"classes: {first_of(classes, _MOST_LISTED)}",
            hint=f"the same folders in both; move {split}/ away where its images have no classes",
        )
    images = [
        (path.relative_to(root).as_posix(), label)
        for label, name in enumerate(classes)
        if name in class_folders
        for path in sorted(_images(root / split / name, source))
    ]
    if not images:
        raise DataError(f"{source}: {split or 'it'} has no image in its classes' folders", hint=_layout_hint(split))
    return tuple(images)


def _images(folder: Path, source: str) -> Iterator[Path]:
    """Yield all images below a folder, also through links."""
    with os.scandir(folder) as entries:
        for item in entries:
            if item.name.startswith("."):
                continue
            if item.is_dir():
                yield from _images(Path(item.path), source)
            elif _is_image(item.name):
                yield _checked_file(item, source)


def _is_image(name: str) -> bool:
    return name.lower().endswith((*IMAGE_SUFFIXES, *_OTHER_IMAGE_SUFFIXES))


def _checked_file(item: os.DirEntry[str], source: str) -> Path:
    if item.name.lower().endswith(_OTHER_IMAGE_SUFFIXES):
        raise DataError(
            f"{source}: {item.path} is of a kind that isn't read; kinds: {', '.join(IMAGE_SUFFIXES)}",
            hint="convert it, or move it away",
        )
    if not item.is_file():
        raise DataError(
            f"{source}: {item.path} is no file, or a link that leads nowhere", hint=f"rm {shlex.quote(item.path)}"
        )
    return Path(item.path)


_WANTED = "a folder with one folder a class, an archive of it, or an s3:// address"


@dataclass(kw_only=True)
class FolderConfig(ImageFilesConfig):
    """A folder with one folder per class, or with train/, val/ and test/ that have these; or an archive of it."""

    name: str = "folder"


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    path = folder.local(config, _WANTED)
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return find_class_folders(path, str(path)).files


def load(config: FolderConfig, work: Workspace) -> ImageSource:
    fetched = folder.get_folder(config, work, _WANTED, IMAGE_SUFFIXES)
    class_folders = find_class_folders(fetched.path, fetched.origin)
    val_is_test = "; the test split is their val folder" if class_folders.val_is_test else ""
    return ImageSource(
        parts={name: partial(_items, class_folders.root, part) for name, part in class_folders.parts.items()},
        classes=class_folders.classes,
        description=f"images in one folder a class{val_is_test}",
        origin=fetched.origin,
    )


def _items(root: Path, part: tuple[tuple[str, int], ...]) -> Iterator[ImageItem]:
    for name, label in part:
        yield ImageItem(name, partial(_open, root / name), label)


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")
