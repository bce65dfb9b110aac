"""Generated images: for trying out a set-up at any size. An accuracy on them means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.base import Part, RawSet, Workspace, refuse_source
from trainers.core.config import DatasetConfig, at_least

if TYPE_CHECKING:
    from pipeline.data.base import Block, Images

_PATTERNS, _TRAIN, _TEST = 0, 1, 2  # streams of one seed
_GRID = 4  # a class's pattern has this many cells a side
_BLOCK = 1024  # images that share a generator: part of what defines the content


@dataclass(kw_only=True)
class SyntheticConfig(DatasetConfig):
    """Generated images; an accuracy on them means nothing.

    Attributes:
        size: images of the training set, before val_size is taken off.
        test_size: images of the test split.
        num_classes: classes.
        channels: channels of an image.
        image_size: height and width in pixels.
        generator_seed: seed of the images.
    """

    name: str = "synthetic"
    size: int = 2048
    test_size: int = 512
    num_classes: int = 10
    channels: int = 3
    image_size: int = 32
    generator_seed: int = 0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        for name in ("size", "test_size", "num_classes", "channels", "image_size"):
            at_least(f"dataset.{name}", getattr(self, name), 1)


def local_inputs(config: DatasetConfig) -> list[Path]:
    """None: the configuration says it all."""
    refuse_source(config)
    return []


def load(config: SyntheticConfig, work: Workspace) -> RawSet:
    """Describe the images; they are generated block by block while they are packed."""
    return RawSet(
        train=_part(config, config.size, _TRAIN),
        test=_part(config, config.test_size, _TEST),
        shape=(config.channels, config.image_size, config.image_size),
        classes=tuple(str(index) for index in range(config.num_classes)),
        source=f"generated (seed {config.generator_seed}): an accuracy on these images means nothing",
        origin="generated",
        synthetic=True,
    )


def _part(config: SyntheticConfig, count: int, stream: int) -> Part:
    return Part(count=count, blocks=lambda: generate(config, count, stream))


def generate(config: SyntheticConfig, count: int, stream: int) -> Iterator[Block]:
    """Half a pattern of the image's class, half noise. Whole numbers throughout and only the raw output of
    PCG64, which numpy keeps stable: the same bytes with every version, on every platform."""
    import numpy as np  # only where a pack is made

    shape = (config.channels, config.image_size, config.image_size)
    patterns = _patterns(config)
    for begin in range(0, count, _BLOCK):
        size = min(_BLOCK, count - begin)
        labels = np.arange(begin, begin + size, dtype=np.int64) % config.num_classes
        noise = _bytes((size, *shape), config.generator_seed, stream, begin // _BLOCK)
        yield (noise >> 1) + (patterns[labels] >> 1), labels


def _patterns(config: SyntheticConfig) -> Images:
    """uint8 [K, C, S, S]: a coarse grid of random cells for each class."""
    import numpy as np  # only where a pack is made

    cells = _bytes((config.num_classes, config.channels, _GRID, _GRID), config.generator_seed, _PATTERNS)
    nearest = np.arange(config.image_size) * _GRID // config.image_size
    return cells[:, :, nearest][:, :, :, nearest]


def _bytes(shape: tuple[int, ...], *seed: int) -> Images:
    import numpy as np  # only where a pack is made

    count = int(np.prod(shape))
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count].reshape(shape)
