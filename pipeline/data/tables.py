"""Read tables of images from parquet files: find the columns, the classes, and the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.data.base import Item, Items

_BATCH = 16  # rows read at once; images of a few MB each still fit easily
_MOST_CLASSES = 100_000


class Table(NamedTuple):
    """The parts of a data set, and the names of its classes."""

    parts: Mapping[str, Items]
    classes: tuple[str, ...]


def table(
    splits: dict[str, list[Path]], folder: Path, origin: str, *, image_column: str | None, label_column: str | None
) -> Table:
    """Read the columns and classes of ``splits``: name → its shards, which lie below ``folder``.

    ``origin``: the data's name in messages.

    Raises DataError: a column is missing or ambiguous, shards don't belong together, or classes have gaps.
    """
    shards = sorted(path for split in splits.values() for path in split)
    columns = _columns(shards[0], image_column, label_column)
    _refuse_other_shards(shards, columns)
    classes, numbers = _classes(splits, columns, origin)
    parts = {name: partial(_items, paths, folder, columns, numbers) for name, paths in splits.items()}
    return Table(parts, classes)


class _Columns(NamedTuple):
    """The chosen columns.

    ``names``: class names from the files' metadata, if present. ``is_struct``: the image column is a struct of bytes
    and path, as on model hubs.
    """

    image: str
    label: str
    is_struct: bool
    names: tuple[str, ...] | None


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file, or it is cut off ({error})") from error


def _columns(path: Path, image_column: str | None, label_column: str | None) -> _Columns:
    with _open(path) as file:
        schema: pa.Schema = file.schema_arrow
    of_images = [field.name for field in schema if _holds_images(field.type)]
    of_labels = [field.name for field in schema if pa.types.is_integer(field.type) or _is_text(field.type)]
    usual = [name for name in ("label", "labels") if name in of_labels]
    integers = [name for name in of_labels if pa.types.is_integer(schema.field(name).type)]
    image = _chosen(path, schema, "image_column", image_column, of_images, of_images)
    label = _chosen(path, schema, "label_column", label_column, of_labels, usual[:1] or integers)
    is_struct = pa.types.is_struct(schema.field(image).type)
    return _Columns(image, label, is_struct, _published_names(schema, label))


def _refuse_other_shards(shards: list[Path], columns: _Columns) -> None:
    """Refuse shards whose columns differ from those of the first shard (another data set). Raises DataError."""
    labels = dict[bool, pa.DataType]()
    for path in shards:
        with _open(path) as file:
            schema: pa.Schema = file.schema_arrow
        if {columns.image, columns.label} - {*schema.names}:
            continue  # reading the shard reports the missing column
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
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # pandas writes categories as dictionaries
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _chosen(path: Path, schema: pa.Schema, field: str, name: str | None, fit: list[str], guess: list[str]) -> str:
    if name is not None and name in fit:
        return name
    if name is None and len(guess) == 1:
        return guess[0]
    columns = ", ".join(f"{item.name} ({item.type})" for item in schema)
    wanted = "encoded images" if field == "image_column" else "labels (integers or names)"
    seen = f"dataset.{field}={name} is no column of" if name is not None else "it isn't clear which column has the"
    raise DataError(f"{path}: {seen} {wanted}; it has: {columns}", hint=f"dataset.{field}={(fit or ['NAME'])[0]}")


def _published_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Return the class names that hubs write into a file's metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"]) or None
    except (KeyError, ValueError, TypeError):
        return None


def _classes(
    splits: dict[str, list[Path]], columns: _Columns, origin: str
) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """Return the class names, and the number of each label of the training rows. Raises DataError."""
    seen = {name: _values(paths, columns) for name, paths in splits.items()}
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
        return _at_least_two(names, origin), {name: number for number, name in enumerate(names)}
    names = columns.names or tuple(map(str, range(max(numbers) + 1)))
    if gaps := sorted({*range(len(names))} ^ numbers):
        raise DataError(
            f"{origin}: {columns.label} has no row of, or no name for, {', '.join(map(str, gaps[:8]))}",
            hint="number the classes 0 … K−1 without gaps, or write their names, which are numbered by themselves",
        )
    return _at_least_two(names, origin), {number: number for number in numbers}


def _at_least_two(names: tuple[str, ...], origin: str) -> tuple[str, ...]:
    if len(names) == 1:
        raise DataError(f"{origin} has one class, {names[0]!r}; wanted: two classes at least")
    return names


def _values(shards: list[Path], columns: _Columns) -> set[int | str]:
    labels: set[int | str] = set()
    for path in shards:
        for begin, batch in _batches(path, [columns.label]):
            values = batch.column(columns.label).to_pylist()
            if None in values:
                row = begin + values.index(None)
                raise DataError(f"{path}: row {row} has no {columns.label}", hint="leave out the rows without a label")
            labels |= set(values)
    return labels


def _batches(path: Path, names: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first row, rows). Raises DataError."""
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


def _items(shards: list[Path], folder: Path, columns: _Columns, numbers: dict[int | str, int]) -> Iterator[Item]:
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
                yield Item(f"{shown}[{row}]", partial(BytesIO, content), numbers[label])
