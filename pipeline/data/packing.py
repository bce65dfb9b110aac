"""The pack builder: splits a data set's images (independent of seeds), and writes a pack of them in bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file, write_json
from pipeline.core.tables import counted
from pipeline.data import manifest
from pipeline.data.base import RawSet, check_class_names
from pipeline.data.progress import OnProgress, room
from trainers.contract.data_pack import IMAGES, LABELS, NAMES, PLACES, VERSION, Manifest
from trainers.contract.run_folder import MANIFEST
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.base import EncodedImage, Images, Labels, Part

    ArrayBlock = tuple[Images, Labels]

_STATISTICS_BLOCK = 1 << 20  # bincount converts its input to int64, eight bytes per element


def write(raw: RawSet, config: DatasetConfig, folder: Path, report: OnProgress) -> Manifest:
    """Write the pack into the empty ``folder`` and fsync it. Raises DataError and OSError."""
    check_class_names(raw.classes, raw.origin)
    check_splits(config.name, raw.train.count, config.holdout, config.val_size, raw.test is not None)
    if raw.val is not None and config.val_size:
        val = f"dataset={config.name} has {raw.val.count} val images of its own, and dataset.val_size={config.val_size}"
        raise DataError(f"{val} would take more from the training images", hint="dataset.val_size=0")
    counts = _counts(raw, config)
    channels, height, width = raw.shape
    # The size of encoded images isn't known in advance; a disk that fills up meanwhile raises the same error.
    needed_bytes = sum(counts) * (channels * height * width + 8) if raw.encoding is None else 0
    with room(folder, needed_bytes):
        with ExitStack() as stack:
            files: PackFiles = (PixelFiles if raw.encoding is None else EncodedFiles)(folder, stack)
            writer = _Writer(raw, counts, files)
            for block, encoded, splits in _blocks_with_splits(raw, config):
                writer.add(block, encoded, splits)
                report(f"packing {config.name}", files.written_bytes, needed_bytes or None)
            writer.finish()
        report(f"hashing {config.name}", 0, None)
        pack_manifest = _manifest(raw, config, counts, folder, writer)
        write_json(folder / MANIFEST, pack_manifest.seal())
        # so that a later command needn't hash the files again
        manifest.write_stamps(folder, pack_manifest, raw.origin)
    return pack_manifest


def _counts(raw: RawSet, config: DatasetConfig) -> tuple[int, int, int]:
    """Return the number of train, val and test images in the pack."""
    test = config.holdout or (raw.test.count if raw.test else 0)
    val = config.val_size + (raw.val.count if raw.val else 0)
    return raw.train.count - config.holdout - config.val_size, val, test


def _blocks_with_splits(
    raw: RawSet, config: DatasetConfig
) -> Iterator[tuple[ArrayBlock, Sequence[EncodedImage], npt.NDArray[np.uint8]]]:
    """Yield each block of n images, their files (in an encoded set), and their splits, uint8 [n]."""
    train_splits = assign_splits(raw.train.count, config.holdout, config.val_size)
    begin = 0
    for block, files in _blocks(raw.train, raw.shape):
        end = begin + len(block[1])
        yield block, files, train_splits[begin:end]
        begin = end
    official_test = None if config.holdout else raw.test  # a hold-out takes the place of official test images
    for part, split in ((raw.val, VAL), (official_test, TEST)):
        if part is None:
            continue
        for block, files in _blocks(part, raw.shape):
            yield block, files, np.full(len(block[1]), split, dtype=np.uint8)


def _blocks(part: Part, shape: tuple[int, int, int]) -> Iterator[tuple[ArrayBlock, Sequence[EncodedImage]]]:
    encoded = part.encoded_blocks or (lambda: ((block, ()) for block in part.blocks()))
    return ((_as_arrays(*block, shape), files) for block, files in encoded())


def _as_arrays(pixels: Images | bytes, labels: Labels | list[int], shape: tuple[int, int, int]) -> ArrayBlock:
    """Return images uint8 [n, C, H, W] and labels int64 [n]. Raises DataError: the bytes are not n images."""
    if isinstance(pixels, bytes):
        if len(pixels) != len(labels) * math.prod(shape):
            raise DataError(f"a block has {len(pixels)} bytes and {len(labels)} labels; an image is uint8 {shape}")
        pixels = np.frombuffer(pixels, dtype=np.uint8).reshape(len(labels), *shape)
    return pixels, np.asarray(labels, dtype=np.int64)


class _Writer:
    """Writes each image at the next free index of its split. Images keep their order within a split."""

    def __init__(self, raw: RawSet, counts: tuple[int, int, int], files: PackFiles) -> None:
        self.raw, self.files = raw, files
        self.ends = [sum(counts[: i + 1]) for i in range(3)]  # the pack has train, then val, then test images
        self.next_index = [0, *self.ends[:2]]
        self.histogram = np.zeros((raw.shape[0], 256), dtype=np.int64)  # of the train images' pixel values, by channel

    def add(self, block: ArrayBlock, encoded: Sequence[EncodedImage], splits: npt.NDArray[np.uint8]) -> None:
        images, labels = block
        self._check(images, labels)
        for split in range(3):
            mask = splits == split
            if not mask.any():
                continue
            selected = images if mask.all() else images[mask]
            # normalisation may only use what the training sees
            if split == TRAIN:
                _count_values(selected, self.histogram)
            self.files.put(self.next_index[split], selected, labels[mask], [*compress(encoded, mask)])
            self.next_index[split] += len(selected)

    def _check(self, images: Images, labels: Labels) -> None:
        classes = len(self.raw.classes)
        if images.shape != (len(labels), *self.raw.shape) or images.dtype != "uint8":
            raise DataError(f"a block has images {images.dtype} {images.shape} and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= classes:
            raise DataError(f"labels from {labels.min()} to {labels.max()}; wanted: 0 to {classes - 1}")

    def finish(self) -> None:
        """Refuse a part with more or fewer images than declared; make the bytes durable."""
        if self.next_index != self.ends:
            raise DataError(f"the source changed while it was read: splits end at {self.next_index}, not {self.ends}")
        self.files.finish()


def _count_values(images: Images, histogram: npt.NDArray[np.int64]) -> None:
    """Add each channel's pixel values to ``histogram`` [C, 256]."""
    for channel, counts in enumerate(histogram):
        values = images[:, channel].ravel()
        # two neighbouring bytes are counted as one 16-bit number, in half the time of single bytes
        even = len(values) // 2 * 2
        counts += np.bincount(values[even:], minlength=256)
        for begin in range(0, even, _STATISTICS_BLOCK):
            pairs = values[begin : min(begin + _STATISTICS_BLOCK, even)].view(np.uint16)
            both = np.bincount(pairs, minlength=1 << 16).reshape(256, 256)
            counts += both.sum(axis=0) + both.sum(axis=1)


def mean_std(counts: list[int]) -> tuple[float, float]:
    """Return mean and population standard deviation (units 0..1) of one channel with ``counts[v]`` pixels of value v.

    Uses exact integers, so the result is equal on every platform; std is 1 for a constant channel.
    """
    pixels = sum(counts)
    first = sum(value * n for value, n in enumerate(counts))
    second = sum(value * value * n for value, n in enumerate(counts))
    variance = (second * pixels - first * first) / (pixels * pixels)
    return first / (pixels * 255), variance**0.5 / 255 or 1.0


def _manifest(
    raw: RawSet, config: DatasetConfig, counts: tuple[int, int, int], folder: Path, writer: _Writer
) -> Manifest:
    channels, height, width = raw.shape
    statistics = [mean_std(row) for row in writer.histogram.tolist()]
    holdout_note = f"; the test split is a hold-out of {config.holdout} training images"
    unsealed = Manifest(
        version=VERSION,
        name=config.name,
        synthetic=raw.synthetic,
        count=sum(counts),
        channels=channels,
        height=height,
        width=width,
        num_classes=len(raw.classes),
        classes=raw.classes,
        splits={name: (end - n, end) for name, n, end in zip(SPLIT_NAMES, counts, writer.ends, strict=True)},
        mean=tuple(mean for mean, _ in statistics),
        std=tuple(std for _, std in statistics),
        sha256={name: sha256_file(folder / name) for name in writer.files.names},
        source=raw.source + (holdout_note if config.holdout else ""),
        source_files=raw.source_files,
        encoding=raw.encoding,
        files=None if raw.encoding is None else {name: (folder / name).stat().st_size for name in writer.files.names},
    )
    return unsealed._replace(digest=unsealed.seal()["digest"])


class PixelFiles:
    """The files of a pack of decoded images: uint8 [N, C, H, W], and labels int64 [N]."""

    names: tuple[str, ...] = (IMAGES, LABELS)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._images, self._labels = (stack.enter_context((folder / name).open("wb")) for name in self.names)
        self.written_bytes = 0

    def put(self, at: int, images: Images, labels: Labels, files: Sequence[EncodedImage]) -> None:
        pixels = np.ascontiguousarray(images)
        _write(self._images, at * pixels[0].nbytes, pixels)
        _write(self._labels, 8 * at, labels.astype("<i8"))
        self.written_bytes += pixels.nbytes + 8 * len(labels)

    def finish(self) -> None:
        """Make the bytes durable."""
        _flush(self._images, self._labels)


class EncodedFiles:
    """The files of a pack of encoded images: the concatenated image files, their index, names and labels.

    The index holds the begin and end of each file, in bytes (int64 [N, 2]). The files are stored as they are read, and
    only the index follows the pack's order, so the source is read once whatever the splits are.
    """

    names: tuple[str, ...] = (IMAGES, PLACES, NAMES, LABELS)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._images, self._places, self._labels = (
            stack.enter_context((folder / name).open("wb")) for name in (IMAGES, PLACES, LABELS)
        )
        self._names_path, self._names = folder / NAMES, dict[int, str]()
        self.written_bytes = 0

    def put(self, at: int, images: Images, labels: Labels, files: Sequence[EncodedImage]) -> None:
        sizes = np.array([len(file.content) for file in files], dtype=np.int64)
        ends = self.written_bytes + np.cumsum(sizes)
        self._images.writelines(file.content for file in files)
        _write(self._places, 16 * at, np.stack([ends - sizes, ends], axis=1).astype("<i8"))
        _write(self._labels, 8 * at, labels.astype("<i8"))
        self._names.update(enumerate((file.name for file in files), at))
        self.written_bytes = int(ends[-1])

    def finish(self) -> None:
        write_json(self._names_path, [name for _, name in sorted(self._names.items())])
        _flush(self._images, self._places, self._labels)


PackFiles = PixelFiles | EncodedFiles
"""The files of a pack in progress. ``put`` writes images and labels from index ``at`` on."""


def _write(file: IO[bytes], offset_bytes: int, values: npt.NDArray[np.generic]) -> None:
    file.seek(offset_bytes)
    file.write(values.data)


def _flush(*files: IO[bytes]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())


TRAIN, VAL, TEST = 0, 1, 2
SPLIT_NAMES = ("train", "val", "test")


def check_splits(name: str, count: int, holdout: int, val_size: int, has_test: bool) -> None:
    """Refuse sizes that leave no training or no test images. Raises DataError."""
    if not has_test and holdout == 0:
        largest = count - val_size - 1  # at least one image remains for training
        suggested = min(max(1, count // 10), largest)
        hint = f"dataset.holdout={suggested}, which takes them from the {count} training images"
        if largest <= 0:
            hint = f"a source with test images, or with more than {counted(count, 'image')}"
        raise DataError(f"dataset={name} has no test images of its own and dataset.holdout=0", hint=hint)
    for field, size, most in (("dataset.holdout", holdout, count), ("dataset.val_size", val_size, count - holdout)):
        if size >= most:
            # without test images of its own, a hold-out of 0 would be refused above
            suggested = max(most // 10, 1 if field == "dataset.holdout" and not has_test else 0)
            more_images = f"a source with test images, or more than {counted(most, 'image')}"
            raise DataError(
                f"{field}={size} leaves no training image: dataset={name} has {most} to take it from",
                hint=f"{field}={suggested}" if suggested < most else more_images,
            )


def assign_splits(count: int, holdout: int, val_size: int) -> npt.NDArray[np.uint8]:
    """Return the split of each of ``count`` training images, uint8 [count].

    Sorted by splitmix64 of their index (Steele, Lea & Flood 2014), the first ``holdout`` images become TEST, the next
    ``val_size`` VAL. So a larger holdout keeps the images of a smaller one, and val_size never changes the test split.
    """
    order = np.argsort(_splitmix64(np.arange(count, dtype=np.uint64)), kind="stable")
    splits = np.full(count, TRAIN, dtype=np.uint8)
    splits[order[:holdout]] = TEST
    splits[order[holdout : holdout + val_size]] = VAL
    return splits


def _splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash each number to a pseudo-random one. Unsigned arrays calculate modulo 2^64, as the algorithm needs."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
