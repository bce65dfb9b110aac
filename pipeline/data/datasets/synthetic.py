"""``dataset=synthetic``: generated images, to try out a set-up at any size. An accuracy on them means nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.base import Part, RawSet, Workspace, refuse_any_source
from trainers.core.config import DatasetConfig, at_least

if TYPE_CHECKING:
    from pipeline.data.base import Block, Images

_PATTERNS, _TRAIN, _TEST = 0, 1, 2  # random streams of the seed
_GRID = 4  # cells per side of a class's pattern
_BLOCK = 1024  # images per generator; changing it changes the content


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
    refuse_any_source(config)
    return []


def load(config: SyntheticConfig, work: Workspace) -> RawSet:
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
    return Part(count=count, blocks=lambda: _generated(config, count, stream))


def _generated(config: SyntheticConfig, count: int, stream: int) -> Iterator[Block]:
    """Yield ``count`` images of (C, S, S): half a pattern of the image's class, half noise.

    Uses only integers and the raw output of PCG64, which numpy keeps stable, so that the bytes are the same everywhere.
    """
    import numpy as np  # looking up a pack generates nothing

    channels, side, classes = config.channels, config.image_size, config.num_classes

    def drawn(shape: tuple[int, ...], *streams: int) -> Images:
        size = math.prod(shape)
        seed = np.random.SeedSequence((config.generator_seed, *streams))
        words = np.random.PCG64(seed).random_raw(-(-size // 8))
        return words.astype("<u8").view(np.uint8)[:size].reshape(shape)

    # a pattern is a coarse grid of random cells, enlarged to the image's size
    nearest = np.arange(side) * _GRID // side
    cells = drawn((classes, channels, _GRID, _GRID), _PATTERNS)
    patterns = cells[:, :, nearest][:, :, :, nearest]  # uint8 [K, C, S, S]
    for begin in range(0, count, _BLOCK):
        size = min(_BLOCK, count - begin)
        labels = np.arange(begin, begin + size, dtype=np.int64) % classes
        noise = drawn((size, channels, side, side), stream, begin // _BLOCK)
        yield (noise >> 1) + (patterns[labels] >> 1), labels
