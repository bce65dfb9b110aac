"""Generate synthetic images: half a pattern of the image's class, half noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.data.base import Block, Images

_PATTERNS = 0  # the seed's random stream for patterns; images use other streams
_GRID = 4  # cells per side of a class's pattern
_BLOCK = 1024  # images per generator; changing it changes the content


def generate(shape: tuple[int, int, int], count: int, *, classes: int, seed: int, stream: int) -> Iterator[Block]:
    """Yield ``count`` images of (C, S, S), block by block.

    Uses only integers and the raw output of PCG64, which numpy keeps stable: the bytes are the same with every numpy
    version on every platform.
    """
    patterns = _patterns(shape, classes, seed)
    for begin in range(0, count, _BLOCK):
        size = min(_BLOCK, count - begin)
        labels = np.arange(begin, begin + size, dtype=np.int64) % classes
        noise = _bytes((size, *shape), seed, stream, begin // _BLOCK)
        yield (noise >> 1) + (patterns[labels] >> 1), labels


def _patterns(shape: tuple[int, int, int], classes: int, seed: int) -> Images:
    """Return uint8 [K, C, S, S]: a coarse grid of random cells for each class."""
    channels, side, _ = shape
    cells = _bytes((classes, channels, _GRID, _GRID), seed, _PATTERNS)
    nearest = np.arange(side) * _GRID // side
    return cells[:, :, nearest][:, :, :, nearest]


def _bytes(shape: tuple[int, ...], *seed: int) -> Images:
    count = int(np.prod(shape))
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count].reshape(shape)
