"""``dataset=parquet``: parquet files with a column of encoded images and one of labels, in any number of shards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.tables import first_of
from pipeline.data.base import ImageFilesConfig, ImageSource, Workspace
from pipeline.data.sources import folder as source_folder
from trainers.core.config import DatasetConfig

_WANTED = "a .parquet file, a folder of them, or an archive of it"
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|val|valid|validation)(?=[/_.-])")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.parquet")


@dataclass(kw_only=True)
class ParquetConfig(ImageFilesConfig):
    """A .parquet file or a folder of shards: a column of encoded images, and one of labels (integers or names).

    Attributes:
        image_column: name of the column of images; null: the only one.
        label_column: name of the column of labels; null: label, labels, or the only column of integers.
    """

    name: str = "parquet"
    image_column: str | None = None
    label_column: str | None = None


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    path = source_folder.local(config, _WANTED)
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return {shard.relative_to(path).as_posix(): shard for shard in _shards(path, str(path))}


def load(config: ParquetConfig, work: Workspace) -> ImageSource:
    from pipeline.data.parquet_rows import read_rows  # loads pyarrow: looking up a pack reads no row

    single = source_folder.one_file(config, work, _WANTED, ".parquet")
    if single is not None:
        folder, shards = source_folder.Fetched(single.path.parent, single.origin), [single.path]
    else:
        folder = source_folder.get_folder(config, work, _WANTED, (".parquet",))
        shards = _shards(folder.path, folder.origin)
    parts, classes = read_rows(
        _shards_by_split(shards, folder),
        folder.path,
        folder.origin,
        image_column=config.image_column,
        label_column=config.label_column,
    )
    val_is_test = "test" not in parts and "val" in parts
    if val_is_test:
        parts = {"test" if name == "val" else name: part for name, part in parts.items()}
    return ImageSource(
        parts=parts,
        classes=classes,
        description=f"images of parquet files{'; the test split is their validation split' if val_is_test else ''}",
        origin=folder.origin,
    )


def _shards(folder: Path, origin: str) -> list[Path]:
    shards = sorted(path for path in folder.rglob("*.parquet") if path.is_file() and not path.name.startswith("."))
    if not shards:
        raise DataError(f"{origin} holds no .parquet file", hint=f"dataset.source=<{_WANTED}>")
    _refuse_missing(shards, origin)
    return shards


def _refuse_missing(shards: list[Path], origin: str) -> None:
    """Refuse a folder without all files of a series such as ``train-00000-of-00004.parquet``. Raises DataError."""
    numbers: dict[tuple[Path, str, str], set[int]] = {}  # (folder, name, count) of a series → numbers that are there
    for path in shards:
        if match := _SHARD.fullmatch(path.name):
            numbers.setdefault((path.parent, match[1], match[3]), set()).add(int(match[2]))
    for (_, name, count), present in numbers.items():
        if missing := sorted({*range(min(int(count), 1_000_000))} - present):
            lacking = first_of([f"{name}-{number:05}-of-{count}.parquet" for number in missing], 3)
            raise DataError(f"{origin} lacks {lacking}", hint="fetch the rest; for a part alone, name its files anew")


def _shards_by_split(shards: list[Path], folder: source_folder.Fetched) -> dict[str, list[Path]]:
    """Group shards by the split that their paths name (``test/0000.parquet``); if none does, all are for training."""
    matches = {path: _SPLIT.search(path.relative_to(folder.path).as_posix()) for path in shards}
    if not any(matches.values()):
        return {"train": shards}
    unknown = [path.name for path, match in matches.items() if match is None]
    if unknown:
        raise DataError(
            f"{folder.origin}: {', '.join(unknown[:8])}: neither train, validation nor test, as other files' names say",
            hint="name it like train-00000.parquet, or move it away",
        )
    splits: dict[str, list[Path]] = {}
    for path, match in matches.items():
        name = match[1] if match is not None else ""
        splits.setdefault("val" if name.startswith("val") else name, []).append(path)
    if "train" not in splits:
        raise DataError(f"{folder.origin} has {', '.join(splits)} and no file whose name begins with train")
    return splits
