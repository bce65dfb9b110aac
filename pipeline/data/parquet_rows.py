"""The reader of ``dataset=parquet``: finds the columns of images and labels in parquet files, the classes, the rows."""

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
from pipeline.data.base import ImageItem, Items

_BATCH = 16  # rows read at once; images of a few MB each still fit easily
_MOST_CLASSES = 100_000


class _Columns(NamedTuple):
    """The columns of images and labels."""

    image: str
    label: str
    is_struct: bool  # an image is a struct of bytes and path, as on the Hugging Face hub; else plain bytes
    class_names: tuple[str, ...] | None  # by number, if the file's metadata has them


def read_rows(
    shards_by_split: Mapping[str, list[Path]],
    folder: Path,
    origin: str,
    *,
    image_column: str | None,
    label_column: str | None,
) -> tuple[dict[str, Items], tuple[str, ...]]:
    """Return the images of each split, and the names of the classes.

    The pack names each image by its shard, relative to ``folder``, and its row. A column that is None is looked for.
    Raises DataError: a column is missing or ambiguous, shards don't belong together, or classes have gaps.
    """
    shards = sorted(path for paths in shards_by_split.values() for path in paths)
    columns = _columns(shards[0], image_column, label_column)
    _refuse_foreign_shards(shards, columns)
    classes, numbers = _classes(shards_by_split, columns, origin)
    parts = {split: partial(_items, paths, folder, columns, numbers) for split, paths in shards_by_split.items()}
    return {**parts}, classes


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file, or it is cut off ({error})") from error


def _columns(path: Path, image_column: str | None, label_column: str | None) -> _Columns:
    with _open(path) as file:
        schema: pa.Schema = file.schema_arrow
    images = [field.name for field in schema if _holds_images(field.type)]
    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    labels = [field.name for field in schema if field.name in integers or _is_text(field.type)]
    # a column of texts may be captions, so it is taken for labels only if it is called so
    default_labels = [name for name in ("label", "labels") if name in labels][:1] or integers
    image = _chosen(path, schema, "image_column", image_column, images, images)
    label = _chosen(path, schema, "label_column", label_column, labels, default_labels)
    is_struct = pa.types.is_struct(schema.field(image).type)
    return _Columns(image, label, is_struct, _published_names(schema, label))


def _chosen(
    path: Path, schema: pa.Schema, setting: str, name: str | None, candidates: list[str], defaults: list[str]
) -> str:
    """Return the column ``name`` if it can be used; without a name, the only default. Raises DataError."""
    if name is not None and name in candidates:
        return name
    if name is None and len(defaults) == 1:
        return defaults[0]
    columns = ", ".join(f"{item.name} ({item.type})" for item in schema)
    content = "encoded images" if setting == "image_column" else "labels (integers or names)"
    fault = f"dataset.{setting}={name} is no column of" if name is not None else "it isn't clear which column has the"
    raise DataError(
        f"{path}: {fault} {content}; it has: {columns}", hint=f"dataset.{setting}={(candidates or ['NAME'])[0]}"
    )


def _refuse_foreign_shards(shards: list[Path], columns: _Columns) -> None:
    """Refuse shards whose columns differ from those of the first shard (another data set). Raises DataError."""
    label_types = dict[bool, pa.DataType]()  # is text → the first such type; two entries: the shards disagree
    for path in shards:
        with _open(path) as file:
            schema: pa.Schema = file.schema_arrow
        if {columns.image, columns.label} - {*schema.names}:
            continue  # reading the shard reports the missing column
        image, label = schema.field(columns.image).type, schema.field(columns.label).type
        names = _published_names(schema, columns.label)
        label_types.setdefault(_is_text(label), label)
        fault, first = "", shards[0].name
        if pa.types.is_struct(image) != columns.is_struct:
            fault = f"{columns.image} is {image}, and another kind of column in {first}"
        elif len(label_types) > 1:
            fault = f"{columns.label} is {label}, and {label_types[not _is_text(label)]} in {first}"
        elif names and columns.class_names and names != columns.class_names:
            fault = f"it calls the classes {', '.join(names)}; {first}: {', '.join(columns.class_names)}"
        if fault:
            raise DataError(f"{path}: {fault}", hint="move the files of another data set away")


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # pandas writes categories as dictionaries
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _published_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Return the class names that the datasets library of Hugging Face stores in a file's metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"]) or None
    except (KeyError, ValueError, TypeError):
        return None


def _classes(
    shards_by_split: Mapping[str, list[Path]], columns: _Columns, origin: str
) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """Return the names of the classes, and label in the files → class number. Raises DataError."""
    labels_by_split = {split: _labels(paths, columns) for split, paths in shards_by_split.items()}
    train = labels_by_split["train"]
    for split, labels in labels_by_split.items():
        if untrained := sorted(labels - train, key=str):
            # -1 is the hub's label of a test set whose labels aren't published
            shown = "they have none: -1" if untrained == [-1] else f"{', '.join(map(str, untrained[:8]))}"
            raise DataError(
                f"{origin}: labels of the {split} rows that no training row has: {shown}", hint="move its files away"
            )
    if all(isinstance(label, str) for label in train):
        names = tuple(sorted(map(str, train)))
        numbers: dict[int | str, int] = {name: number for number, name in enumerate(names)}
    else:
        names = _names_of_numbers({int(label) for label in train}, columns, origin)
        numbers = {int(label): int(label) for label in train}
    if len(names) == 1:
        raise DataError(f"{origin} has one class, {names[0]!r}; wanted: two classes at least")
    return names, numbers


def _names_of_numbers(numbers: set[int], columns: _Columns, origin: str) -> tuple[str, ...]:
    if numbers and (min(numbers) < 0 or max(numbers) >= _MOST_CLASSES):
        raise DataError(f"{origin}: {columns.label} has {min(numbers)} to {max(numbers)}; wanted: 0 … K−1")
    names = columns.class_names or tuple(map(str, range(max(numbers) + 1)))
    if gaps := sorted({*range(len(names))} ^ numbers):
        raise DataError(
            f"{origin}: {columns.label} has no row of, or no name for, {', '.join(map(str, gaps[:8]))}",
            hint="number the classes 0 … K−1 without gaps, or write their names, which are numbered by themselves",
        )
    return names


def _labels(shards: list[Path], columns: _Columns) -> set[int | str]:
    """Return the different labels of all rows. Raises DataError: a row has none."""
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
    """Yield pairs of a first row's number and pyarrow's batch of these columns from there on. Raises DataError."""
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


def _items(shards: list[Path], folder: Path, columns: _Columns, numbers: dict[int | str, int]) -> Iterator[ImageItem]:
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
                yield ImageItem(f"{shown}[{row}]", partial(BytesIO, content), numbers[label])
