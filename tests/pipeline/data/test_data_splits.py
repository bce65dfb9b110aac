from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.packing import TEST, VAL, assign_splits, check_splits, mean_std


def test_the_choice_is_the_same_for_ever() -> None:
    """splitmix64 of 0, 1, 2 … in Python's own integers: no numpy version can change it."""
    assert np.flatnonzero(assign_splits(20, 3, 4) == TEST).tolist() == expected(20)[:3]
    assert sorted(np.flatnonzero(assign_splits(20, 3, 4) == VAL).tolist()) == sorted(expected(20, 7)[3:])


def expected(count: int, chosen: int = 3) -> list[int]:
    order = sorted(range(count), key=splitmix64)
    return sorted(order[:3]) + order[3:chosen]


def splitmix64(value: int) -> int:
    mask = 2**64 - 1
    mixed = (value + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def test_a_larger_holdout_keeps_the_images_of_a_smaller_one() -> None:
    small, large = (set(np.flatnonzero(assign_splits(1000, n, 0) == TEST)) for n in (50, 200))
    assert small < large


def test_a_set_without_test_images_asks_for_a_holdout() -> None:
    with pytest.raises(DataError, match=r"no test images of its own and dataset.holdout=0\n  try: dataset.holdout=179"):
        check_splits("digits", 1797, 0, 0, has_test=False)


@pytest.mark.parametrize(("holdout", "val_size", "field"), [(100, 0, "holdout=100"), (60, 40, "val_size=40")])
def test_no_training_image_left_is_an_error(holdout: int, val_size: int, field: str) -> None:
    with pytest.raises(DataError, match=f"dataset.{field} leaves no training image"):
        check_splits("arrays", 100, holdout, val_size, has_test=True)


def test_a_constant_channel_has_std_one() -> None:
    counts = [0] * 256
    counts[51] = 7
    assert mean_std(counts) == (0.2, 1.0)


@pytest.mark.parametrize("has_test", [False, True])
@pytest.mark.parametrize("val_size", [0, 5])
@pytest.mark.parametrize("holdout", [0, 1, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_advice_is_never_refused(count: int, holdout: int, val_size: int, has_test: bool) -> None:
    sizes = {"dataset.holdout": holdout, "dataset.val_size": val_size}
    for _ in range(3):
        told = refused(count, sizes, has_test)
        found = re.search(r"try: (dataset\.\w+)=(\d+)", told)
        if found is None:
            assert told == "" or re.search(r"try: a source with test images, or (with )?more than \d+ image", told)
            return
        assert sizes[found[1]] != int(found[2])
        sizes[found[1]] = int(found[2])
    raise AssertionError("one piece of advice led to the next")


def refused(count: int, sizes: dict[str, int], has_test: bool) -> str:
    """What is said of these sizes; nothing where they are good."""
    try:
        check_splits("arrays", count, sizes["dataset.holdout"], sizes["dataset.val_size"], has_test)
    except DataError as error:
        return str(error)
    return ""
