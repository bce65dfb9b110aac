"""Which images become train, val and test: a fixed choice, independent of the run's seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TRAIN, VAL, TEST = 0, 1, 2
NAMES = ("train", "val", "test")


def check(name: str, count: int, holdout: int, val_size: int, has_test: bool) -> None:
    """Refuse sizes that leave no training or no test images. Raises DataError."""
    if not has_test and holdout == 0:
        most = count - val_size - 1  # one image at least stays for training
        share = f"dataset.holdout={min(max(1, count // 10), most)}, which takes them from the {count} training images"
        raise DataError(
            f"dataset={name} has no test images of its own and dataset.holdout=0",
            hint=share if most > 0 else f"a source with test images, or with more than {_images(count)}",
        )
    for field, size, left in (
        ("dataset.holdout", holdout, count),
        ("dataset.val_size", val_size, count - holdout),
    ):
        if size >= left:
            needs_one = field == "dataset.holdout" and not has_test
            less = max(left // 10, int(needs_one))
            raise DataError(
                f"{field}={size} leaves no training image: dataset={name} has {left} to take it from",
                hint=f"{field}={less}" if less < left else f"a source with test images, or more than {_images(left)}",
            )


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"


def assign(count: int, holdout: int, val_size: int) -> npt.NDArray[np.uint8]:
    """The split (TRAIN, VAL or TEST) of each of ``count`` training images, uint8 [count].

    Images are ranked by splitmix64 of their index (Steele, Lea & Flood 2014), a bijection on 64-bit integers,
    so there are no ties and nothing depends on numpy's generators. The ``holdout`` lowest become test, the
    next ``val_size`` val. A larger holdout therefore keeps the images of a smaller one, and changing val_size
    never changes the test split.
    """
    import numpy as np

    order = np.argsort(_splitmix64(np.arange(count, dtype=np.uint64)), kind="stable")
    chosen = np.full(count, TRAIN, dtype=np.uint8)
    chosen[order[:holdout]] = TEST
    chosen[order[holdout : holdout + val_size]] = VAL
    return chosen


def _splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Arithmetic modulo 2^64, which unsigned arrays do by definition."""
    import numpy as np

    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
