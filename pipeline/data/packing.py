"""Split and write the images: two flat files and their manifest, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file, write_json
from pipeline.data import disk, manifest, splits
from pipeline.data.base import RawSet
from pipeline.data.manifest import IMAGES, LABELS, MANIFEST, Manifest
from pipeline.data.progress import OnProgress
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.data.base import Block, Images, Labels

_STATISTICS_BLOCK = 1 << 20  # bincount widens its input to int64, eight bytes an element


def write(raw: RawSet, config: DatasetConfig, folder: Path, report: OnProgress) -> Manifest:
    """Write the pack into the empty ``folder`` and fsync it. Raises DataError and OSError."""
    splits.check(config.name, raw.train.count, config.holdout, config.val_size, raw.test is not None)
    counts = _counts(raw, config)
    channels, height, width = raw.shape
    needed_bytes = sum(counts) * (channels * height * width + 8)
    with disk.room(folder, needed_bytes):
        with (folder / IMAGES).open("wb") as images, (folder / LABELS).open("wb") as labels:
            writer = _Writer(raw, counts, images, labels)
            for block, chosen in _assigned(raw, config):
                writer.add(block, chosen)
                report(f"packing {config.name}", writer.written_bytes, needed_bytes)
            writer.finish()
        report(f"hashing {config.name}", 0, None)
        made = _manifest(raw, config, counts, folder, writer)
        write_json(folder / MANIFEST, made.seal())
        manifest.note_stamps(folder, raw.origin)
    return made


def _counts(raw: RawSet, config: DatasetConfig) -> tuple[int, int, int]:
    test = config.holdout or (raw.test.count if raw.test else 0)
    return raw.train.count - config.holdout - config.val_size, config.val_size, test


def _assigned(raw: RawSet, config: DatasetConfig) -> Iterator[tuple[Block, npt.NDArray[np.uint8]]]:
    """Each block with the split of each of its images. Official test images are left out where
    ``holdout`` makes the test split."""
    import numpy as np

    chosen = splits.assign(raw.train.count, config.holdout, config.val_size)
    begin = 0
    for block in raw.train.blocks():
        end = begin + len(block[1])
        yield block, chosen[begin:end]
        begin = end
    if raw.test is not None and not config.holdout:
        for block in raw.test.blocks():
            yield block, np.full(len(block[1]), splits.TEST, dtype=np.uint8)


class _Writer:
    """Puts each image where its split has got to; images keep their order within a split."""

    def __init__(self, raw: RawSet, counts: tuple[int, int, int], images: BinaryIO, labels: BinaryIO) -> None:
        import numpy as np

        self.raw = raw
        self.ends = [sum(counts[: i + 1]) for i in range(3)]
        self.next = [0, *self.ends[:2]]
        self.images, self.labels = images, labels
        self.written_bytes = 0
        self.histogram = np.zeros((raw.shape[0], 256), dtype=np.int64)

    def add(self, block: Block, chosen: npt.NDArray[np.uint8]) -> None:
        images, labels = block
        self._check(images, labels)
        for split in range(3):
            mask = chosen == split
            picked = images if mask.all() else images[mask]
            if split == splits.TRAIN:
                _count_values(picked, self.histogram)
            self._put(split, picked, labels[mask])

    def _check(self, images: Images, labels: Labels) -> None:
        classes = len(self.raw.classes)
        if images.shape != (len(labels), *self.raw.shape) or images.dtype != "uint8":
            raise DataError(f"a block has images {images.dtype} {images.shape} and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= classes:
            raise DataError(f"labels from {labels.min()} to {labels.max()}; wanted 0 to {classes - 1}")

    def _put(self, split: int, images: Images, labels: Labels) -> None:
        import numpy as np

        at = self.next[split]
        self.next[split] += len(labels)
        pixels = np.ascontiguousarray(images)
        for file, content, item_bytes in (
            (self.images, pixels.data, int(np.prod(self.raw.shape))),
            (self.labels, labels.astype("<i8").data, 8),
        ):
            file.seek(at * item_bytes)
            file.write(content)
            self.written_bytes += len(labels) * item_bytes

    def finish(self) -> None:
        """Refuse a part that gave more or fewer images than it said; make the bytes durable."""
        if self.next != self.ends:
            raise DataError(f"the source changed while it was read: splits end at {self.next}, not {self.ends}")
        for file in (self.images, self.labels):
            file.flush()
            os.fsync(file.fileno())


def _count_values(images: Images, histogram: npt.NDArray[np.int64]) -> None:
    """Add each channel's pixel values to ``histogram`` [C, 256]: exact integers, whatever the block size."""
    import numpy as np

    for channel, counts in enumerate(histogram):
        values = images[:, channel].ravel()
        for begin in range(0, len(values), _STATISTICS_BLOCK):
            counts += np.bincount(values[begin : begin + _STATISTICS_BLOCK], minlength=256)


def mean_std(counts: list[int]) -> tuple[float, float]:
    """Mean and population standard deviation, in 0..1 units, of one channel with ``counts[v]`` pixels of
    value v. Computed in exact integers, so it is equal on every platform; std 1 for a constant channel."""
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
    held_out = f"; the test split is a hold-out of {config.holdout} training images"
    made = Manifest(
        version=manifest.VERSION,
        name=config.name,
        synthetic=raw.synthetic,
        count=sum(counts),
        channels=channels,
        height=height,
        width=width,
        num_classes=len(raw.classes),
        classes=raw.classes,
        splits={name: (end - n, end) for name, n, end in zip(splits.NAMES, counts, writer.ends, strict=True)},
        mean=tuple(mean for mean, _ in statistics),
        std=tuple(std for _, std in statistics),
        sha256={name: sha256_file(folder / name) for name in (IMAGES, LABELS)},
        source=raw.source + (held_out if config.holdout else ""),
        source_files=raw.source_files,
    )
    return replace(made, digest=made.seal()["digest"])
