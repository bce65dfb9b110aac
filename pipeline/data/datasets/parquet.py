"""Images in parquet files, as hubs publish them: a column of encoded images, one of labels, in any number of shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.errors import DataError
from pipeline.data import images
from pipeline.data.base import RawSet, Workspace
from pipeline.data.image_settings import ImageFilesConfig
from pipeline.data.sources import folder as source_folder
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    import pyarrow as pa

_WANTED = "a .parquet file, a folder of them, or an archive of it"
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|val|valid|validation)(?=[/_.-])")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.parquet")
_BATCH = 16  # rows that are read at once: images of a few MB each are no burden
_MOST_CLASSES = 100_000


@dataclass(kw_only=True)
class ParquetConfig(ImageFilesConfig):
    """A .parquet file or a folder of shards: a column of encoded images, and one of labels (integers or names).

    Attributes:
        image_column: its name; null: the only column of images.
        label_column: its name; null: label, labels, or the only column of integers.
    """

    name: str = "parquet"
    image_column: str | None = None
    label_column: str | None = None


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    """Every shard by its path, which says its split; or the file or archive alone."""
    path = source_folder.local(config, _WANTED)
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return {shard.relative_to(path).as_posix(): shard for shard in _shards(path, str(path))}


def load(config: ParquetConfig, work: Workspace) -> RawSet:
    """Find columns, classes and splits; images are decoded while they are packed. Raises DataError."""
    one = source_folder.one_file(config, work, _WANTED, ".parquet")
    if one is not None:
        place = source_folder.Place(one[0].parent, one[1])
        shards = [one[0]]
    else:
        place = source_folder.get_folder(config, work, _WANTED, (".parquet",))
        shards = _shards(place.folder, place.origin)
    columns = _columns(shards[0], config)
    _refuse_other_shards(shards, columns)
    splits = _splits(shards, place)
    classes, numbers = _classes(splits, columns, place.origin)
    parts = {name: partial(_items, found, place.folder, columns, numbers) for name, found in splits.items()}
    val_is_test = "test" not in parts and "val" in parts
    if val_is_test:
        parts["test"] = parts.pop("val")
    source = images.Source(
        parts=parts,
        classes=classes,
        text=f"images of parquet files{'; the test split is their validation split' if val_is_test else ''}",
        origin=place.origin,
    )
    return images.raw_set(source, config, work.report)


def _shards(folder: Path, origin: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*.parquet") if path.is_file() and not path.name.startswith("."))
    if not found:
        raise DataError(f"{origin} holds no .parquet file", hint=f"dataset.source=<{_WANTED}>")
    _refuse_missing(found, origin)
    return found


def _refuse_missing(shards: list[Path], origin: str) -> None:
    """Raises DataError: names say how many there are, and a part of them alone would be packed without a word."""
    numbers: dict[tuple[Path, str, str], set[int]] = {}
    for path in shards:
        if found := _SHARD.fullmatch(path.name):
            numbers.setdefault((path.parent, found[1], found[3]), set()).add(int(found[2]))
    for (_, name, count), there in numbers.items():
        if missing := sorted({*range(min(int(count), 1_000_000))} - there):
            shown = ", ".join(f"{name}-{number:05}-of-{count}.parquet" for number in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise DataError(
                f"{origin} lacks {shown}{more}", hint="fetch the rest; for a part alone, name its files anew"
            )


def _splits(shards: list[Path], place: source_folder.Place) -> dict[str, list[Path]]:
    """By names, as in ``train-00000-of-00002.parquet`` or ``test/0000.parquet``; else all are for training."""
    names = {path: _SPLIT.search(path.relative_to(place.folder).as_posix()) for path in shards}
    if not any(names.values()):
        return {"train": shards}
    unknown = [path.name for path, found in names.items() if found is None]
    if unknown:
        raise DataError(
            f"{place.origin}: {', '.join(unknown[:8])}: neither train, validation nor test, as other files' names say",
            hint="name it like train-00000.parquet, or move it away",
        )
    splits: dict[str, list[Path]] = {}
    for path, found in names.items():
        name = found[1] if found is not None else ""
        splits.setdefault("val" if name.startswith("val") else name, []).append(path)
    if "train" not in splits:
        raise DataError(f"{place.origin} has {', '.join(splits)} and no file whose name begins with train")
    return splits


class _Columns(NamedTuple):
    """``names``: those of the classes, where the files say them. ``is_struct``: of bytes and path, as hubs have it."""

    image: str
    label: str
    is_struct: bool
    names: tuple[str, ...] | None


def _open(path: Path) -> Any:
    import pyarrow as pa  # only where tables are read
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file, or it is cut off ({error})") from error


def _columns(path: Path, config: ParquetConfig) -> _Columns:
    import pyarrow as pa  # only where tables are read

    with _open(path) as file:
        schema: pa.Schema = file.schema_arrow
    of_images = [field.name for field in schema if _holds_images(field.type)]
    of_labels = [field.name for field in schema if pa.types.is_integer(field.type) or _is_text(field.type)]
    usual = [name for name in ("label", "labels") if name in of_labels]
    integers = [name for name in of_labels if pa.types.is_integer(schema.field(name).type)]
    image = _chosen(path, schema, "image_column", config.image_column, of_images, of_images)
    label = _chosen(path, schema, "label_column", config.label_column, of_labels, usual[:1] or integers)
    is_struct = pa.types.is_struct(schema.field(image).type)
    return _Columns(image, label, is_struct, _published_names(schema, label))


def _refuse_other_shards(shards: list[Path], columns: _Columns) -> None:
    """Raises DataError: one was written otherwise than the first, as those of another set are."""
    import pyarrow as pa  # only where tables are read

    labels = dict[bool, pa.DataType]()
    for path in shards:
        with _open(path) as file:
            schema: pa.Schema = file.schema_arrow
        if {columns.image, columns.label} - {*schema.names}:
            continue  # who reads it says so
        image, label = schema.field(columns.image).type, schema.field(columns.label).type
        names = _published_names(schema, columns.label)
        labels.setdefault(_is_text(label), label)
        why = ""
        if pa.types.is_struct(image) != columns.is_struct:
            why = f"{columns.image} is {image}, and another kind of column in {shards[0].name}"
        elif len(labels) > 1:
            why = f"{columns.label} is {label}, and {labels[not _is_text(label)]} in {shards[0].name}"
        elif None not in (names, columns.names) and names != columns.names:
            why = f"it calls the classes {', '.join(names or ())}; {shards[0].name}: {', '.join(columns.names or ())}"
        if why:
            raise DataError(f"{path}: {why}", hint="move the files of another data set away")


def _holds_images(kind: pa.DataType) -> bool:
    import pyarrow as pa  # only where tables are read

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa  # only where tables are read

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # as pandas writes categories
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _chosen(path: Path, schema: pa.Schema, field: str, asked: str | None, fit: list[str], guess: list[str]) -> str:
    if asked is not None and asked in fit:
        return asked
    if asked is None and len(guess) == 1:
        return guess[0]
    columns = ", ".join(f"{item.name} ({item.type})" for item in schema)
    wanted = "encoded images" if field == "image_column" else "labels (integers or names)"
    seen = f"dataset.{field}={asked} is no column of" if asked is not None else "it isn't clear which column has the"
    raise DataError(f"{path}: {seen} {wanted}; it has: {columns}", hint=f"dataset.{field}={(fit or ['NAME'])[0]}")


def _published_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """The names of the classes that hubs write into a file's metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"]) or None
    except (KeyError, ValueError, TypeError):
        return None


def _classes(
    splits: dict[str, list[Path]], columns: _Columns, origin: str
) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """The names of the classes, and the number of each label that the training rows have. Raises DataError."""
    seen = {name: _values(found, columns) for name, found in splits.items()}
    train = seen["train"]
    for name, labels in seen.items():
        if strange := sorted(labels - train, key=str):
            what = "they have none: -1" if strange == [-1] else f"{', '.join(map(str, strange[:8]))}"
            raise DataError(
                f"{origin}: labels of the {name} rows that no training row has: {what}", hint="move its files away"
            )
    texts = all(isinstance(label, str) for label in train)
    numbers = {int(label) for label in train} if not texts else set[int]()
    if numbers and (min(numbers) < 0 or max(numbers) >= _MOST_CLASSES):
        raise DataError(f"{origin}: {columns.label} has {min(numbers)} to {max(numbers)}; wanted: 0 … K−1")
    if texts:
        names = tuple(sorted(map(str, train)))
        return _several(names, origin), {name: number for number, name in enumerate(names)}
    names = columns.names or tuple(map(str, range(max(numbers) + 1)))
    if gaps := sorted({*range(len(names))} ^ numbers):
        raise DataError(
            f"{origin}: {columns.label} has no row of, or no name for, {', '.join(map(str, gaps[:8]))}",
            hint="number the classes 0 … K−1 without gaps, or write their names, which are numbered by themselves",
        )
    return _several(names, origin), {number: number for number in numbers}


def _several(names: tuple[str, ...], origin: str) -> tuple[str, ...]:
    if len(names) == 1:
        raise DataError(f"{origin} has one class, {names[0]!r}; wanted: two classes at least")
    return names


def _values(shards: list[Path], columns: _Columns) -> set[int | str]:
    found: set[int | str] = set()
    for path in shards:
        for begin, batch in _batches(path, [columns.label]):
            values = batch.column(columns.label).to_pylist()
            if None in values:
                row = begin + values.index(None)
                raise DataError(f"{path}: row {row} has no {columns.label}", hint="leave out the rows without a label")
            found |= set(values)
    return found


def _batches(path: Path, names: list[str]) -> Iterator[tuple[int, Any]]:
    """(number of the first row, rows). Raises DataError."""
    import pyarrow as pa  # only where tables are read

    begin = 0
    with _open(path) as file:
        missing = [name for name in names if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]}; it has: {', '.join(file.schema_arrow.names)}")
        try:
            for batch in file.iter_batches(batch_size=_BATCH, columns=names):
                yield begin, batch
                begin += len(batch)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is damaged or cut off after row {begin} ({error})") from error


def _items(shards: list[Path], folder: Path, columns: _Columns, numbers: dict[int | str, int]) -> Iterator[images.Item]:
    for path in shards:
        shown = path.relative_to(folder).as_posix()
        for begin, batch in _batches(path, [columns.image, columns.label]):
            column = batch.column(columns.image)
            contents = column.field("bytes") if columns.is_struct else column
            labels = batch.column(columns.label).to_pylist()
            for row, (content, label) in enumerate(zip(contents.to_pylist(), labels, strict=True), begin):
                if content is None:
                    raise DataError(
                        f"{path}: row {row} has no bytes of an image", hint="rows that hold only paths can't be read"
                    )
                yield images.Item(f"{shown}[{row}]", partial(BytesIO, content), numbers[label])
