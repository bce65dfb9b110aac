"""Counter-based random numbers, for the order of samples and all augmentation: a number depends only on its key and
index, not on the rank or on earlier calls, so a resumed run draws the same ones. The mixing function is the finaliser
of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) on int64 tensors, whose
arithmetic wraps like unsigned 64-bit arithmetic."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment, 2**64 divided by the golden ratio
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of its finaliser
_NUMPY = "numpy.random"  # no import statement: a node may lack numpy, and an import would add it to the run key


class Stream(IntEnum):
    """The purpose of a random number; streams of one seed are independent of each other."""

    ORDER = 1
    AUGMENT = 2
    DROPOUT = 3
    FLIP = 4
    CUTOUT = 5
    OWN = 6
    RESIZED_CROP = 7
    EVALUATION = 8


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Fold non-negative integers (seed, stream, epoch, …) into one unsigned 64-bit key."""
    state = 0
    for part in parts:
        state = _mix_int((state + _GOLDEN + part * _MULTIPLIERS[0]) & _MASK)
    return state


def shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift an int64 tensor right logically (``>>`` would copy the sign bit). 0 < count < 64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def random_bits(stream_key: int, index: Tensor) -> Tensor:
    """Return 64 random bits for each element of ``index`` (int64, any shape), as an int64 tensor."""
    bits = index * _signed(_GOLDEN) + _signed(stream_key)
    bits = (bits ^ shift_right(bits, 30)) * _signed(_MULTIPLIERS[0])
    bits = (bits ^ shift_right(bits, 27)) * _signed(_MULTIPLIERS[1])
    return bits ^ shift_right(bits, 31)


def below(bits: Tensor, shift: int, limit: int) -> Tensor:
    """Return integers in [0, limit) from the 24 bits that start at ``shift`` (0, 24 or 40). limit ≤ 2**24."""
    field = (shift_right(bits, shift) if shift else bits) & 0xFFFFFF
    return (field * limit) >> 24


def epoch_order(seed: int, epoch: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the order in which an epoch visits ``count`` samples: an int64 permutation of shape [count]."""
    index = torch.arange(count, device=device)
    return torch.sort(random_bits(key(seed, Stream.ORDER, epoch), index), stable=True).indices


def seed_libraries(seed: int) -> None:
    """Seed Python's and numpy's generators, which user-defined models and augmentations may use. Takes 10 µs."""
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.seed(seed % 2**32)


@contextmanager
def libraries_restored() -> Iterator[None]:
    """Return a context after which Python's and numpy's generators have their earlier state."""
    numpy = _numpy()
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


def _numpy() -> ModuleType | None:
    """Return numpy.random if torch has loaded numpy, else None."""
    if sys.modules.get("numpy") is None:
        return None
    # numpy imports numpy.random on first use, which would be too late for the seed
    return sys.modules.get(_NUMPY) or importlib.import_module(_NUMPY)
