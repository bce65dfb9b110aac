"""``dataset=arrays``: your own arrays in one .npz: ``images``, ``labels``, perhaps ``test_images`` and ``test_labels``.

The axis of the channels is the second or the last, whichever has length 1, 3 or 4. If both have, a string array
``layout`` ("NCHW" or "NHWC") decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file
from pipeline.data.base import Part, RawSet, Workspace, images_per_block
from pipeline.data.sources.download import DownloadRequest, download
from pipeline.data.sources.source import file_name, local_path, refuse_special, without_login
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.base import Block, Labels
    from pipeline.data.npz import ArrayFile, InMemory

    Arrays = ArrayFile | InMemory

_NAMES = (("images", "labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test"))
_CHANNELS = (1, 3, 4)
_MAX_GAPS = 8  # missing classes that an error lists


@dataclass(kw_only=True)
class ArraysConfig(DatasetConfig):
    """Nothing more to set."""

    name: str = "arrays"


def local_inputs(config: DatasetConfig) -> list[Path]:
    """Return the user's file, unless it is a URL. Called at each look-up of the pack, which the content decides."""
    path = local_path(_source(config))
    if path is not None:
        refuse_special(config.source, path)  # anything but a regular file: a folder, a FIFO, a device
    return [] if path is None else [path]


def load(config: DatasetConfig, work: Workspace) -> RawSet:
    source = _source(config)
    path = local_path(source)
    origin = str(path)
    if path is None:
        request = DownloadRequest(name=file_name(source) or "arrays.npz", urls=(source,), sha256=None)
        path, origin = download(config, request, work.folder, work.report), without_login(source)
    made = raw_set(path, source="arrays of a .npz file", origin=origin)
    # the pack records the user's file by this fixed name, so that renaming the file doesn't change the pack
    return replace(made, source_files={"arrays.npz": sha256_file(path)})


def raw_set(arrays: Path | Mapping[str, Any], *, source: str, origin: str) -> RawSet:
    """Check the arrays of a .npz file or a mapping, and return the data set that they are. Raises DataError."""
    from pipeline.data.npz import ArrayFile, InMemory  # loads numpy: looking up a pack reads no array

    file: Arrays = ArrayFile(arrays) if isinstance(arrays, Path) else InMemory(origin, arrays)
    path = file.path
    names = next((names for names in _NAMES if names[0] in file.names), None)
    if names is None:
        raise DataError(f"{path} has the arrays {', '.join(file.names) or '(none)'}; wanted: images and labels")
    train = _Half.open(file, names[0], names[1])
    test = _Half.open(file, names[2], names[3]) if {names[2], names[3]} & set(file.names) else None
    classes = _classes(path, train, test)
    if test is not None and test.shape != train.shape:
        raise DataError(f"{path}: {names[2]} are {test.shape} (C, H, W), {names[0]} {train.shape}; wanted: equal")
    return RawSet(
        train=train.part(),
        test=test.part() if test else None,
        shape=train.shape,
        classes=tuple(str(index) for index in range(classes)),
        source=source,
        origin=origin,
    )


def _source(config: DatasetConfig) -> str:
    if config.source is None:
        raise DataError("dataset=arrays needs your file", hint="dataset.source=<path or URL of a .npz>")
    return config.source


@dataclass(frozen=True)
class _Half:
    """The training or the test arrays, checked: images of ``shape`` (C, H, W) in the array ``name``."""

    file: Arrays
    name: str
    labels: Labels
    shape: tuple[int, int, int]
    channels_last: bool

    @classmethod
    def open(cls, file: Arrays, images: str, labels: str) -> _Half:
        shape, channels_last = _image_shape(file, images)
        count = file.header(images).shape[0]
        # Compare the headers first, before the labels are read. `_labels` reports labels that are missing or scalar.
        label_shape = file.header(labels).shape if labels in file.names else ()
        if label_shape and label_shape[0] != count:
            raise DataError(f"{file.path}: {images} has {count} images, {labels} {label_shape[0]}; wanted: as many")
        label_array = _labels(file, labels)
        if count == 0:
            raise DataError(f"{file.path}: {images} is empty; wanted: at least one image")
        return cls(file, images, label_array, shape, channels_last)

    def part(self) -> Part:
        return Part(count=len(self.labels), blocks=self._blocks)

    def _blocks(self) -> Iterator[Block]:
        begin = 0
        for images in self.file.blocks(self.name, images_per_block(self.shape)):
            end = begin + len(images)
            ordered = images.transpose(0, 3, 1, 2) if self.channels_last else images.reshape(-1, *self.shape)
            yield ordered, self.labels[begin:end]
            begin = end


def _image_shape(file: Arrays, name: str) -> tuple[tuple[int, int, int], bool]:
    """Return the shape (C, H, W) of an image, and whether the array has the channels last. Raises DataError."""
    dtype, shape = file.header(name).dtype, file.header(name).shape
    if dtype != "uint8":
        raise DataError(
            f"{file.path}: {name} is {dtype}; wanted: uint8 (0..255)",
            hint="save images.astype('uint8'), after scaling values of 0..1 by 255",
        )
    if len(shape) not in (3, 4) or 0 in shape[1:]:
        raise DataError(f"{file.path}: {name} has shape {shape}; wanted: [N, H, W], [N, H, W, C] or [N, C, H, W]")
    if len(shape) == 3:
        return (1, shape[1], shape[2]), False
    if _channels_last(file, name, shape):
        return (shape[3], shape[1], shape[2]), True
    return (shape[1], shape[2], shape[3]), False


def _channels_last(file: Arrays, name: str, shape: tuple[int, ...]) -> bool:
    if "layout" in file.names:
        layout = str(file.load("layout"))
        if layout not in ("NHWC", "NCHW"):
            raise DataError(f"{file.path}: layout is {layout!r}; wanted: 'NHWC' or 'NCHW'")
        return layout == "NHWC"
    may_be_last, may_be_first = shape[3] in _CHANNELS, shape[1] in _CHANNELS
    if may_be_last == may_be_first:
        raise DataError(
            f"{file.path}: {name} has shape {shape}, which does not tell where the channels are "
            f"(an axis of {', '.join(map(str, _CHANNELS))})",
            hint="save one more array in the .npz: layout='NHWC' or layout='NCHW'",
        )
    return may_be_last


def _labels(file: Arrays, name: str) -> Labels:
    if name not in file.names:
        raise DataError(f"{file.path} has no array {name}; it has: {', '.join(file.names)}")
    header = file.header(name)
    if header.dtype.kind not in "iu":
        raise DataError(f"{file.path}: {name} is {header.dtype}; wanted: integers 0 … K−1, one for each image")
    if len(header.shape) != 1 and header.shape[1:] != (1,):
        raise DataError(f"{file.path}: {name} has shape {header.shape}; wanted: [N]")
    values: Any = file.load(name).reshape(-1)
    if len(values) and (values.min() < 0 or values.max() >= 2**31):
        wrong = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{file.path}: {name} holds {wrong}; wanted: class numbers from 0 to K−1")
    labels: Labels = values.astype("int64", copy=False)
    return labels


def _classes(path: Path | str, train: _Half, test: _Half | None) -> int:
    """Return the number of classes. Raises DataError: class numbers have gaps, or the test labels have further ones."""
    present: set[int] = {*train.labels.tolist()}
    classes = max(present) + 1
    # a wrong label may be as large as 2^31: look no further than where the gaps to list must be
    gaps = [number for number in range(min(classes, len(present) + _MAX_GAPS)) if number not in present]
    if gaps:
        listed = ", ".join(map(str, gaps[:_MAX_GAPS]))
        raise DataError(
            f"{path}: labels go up to {classes - 1} but no image has {listed}; wanted: 0 … K−1, no gaps",
            hint="labels = numpy.unique(labels, return_inverse=True)[1] numbers them anew, without gaps",
        )
    if test is not None and test.labels.max() >= classes:
        raise DataError(f"{path}: test labels go up to {test.labels.max()}, training labels to {classes - 1}")
    return classes
