"""Numbers as people read them."""

from __future__ import annotations

import pytest

from pipeline.core.tables import duration, file_size


@pytest.mark.parametrize(
    ("count_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (7 * 10**12, "7.0 TB")],
)
def test_a_size_has_the_unit_in_which_it_is_short(count_bytes: int, shown: str) -> None:
    assert file_size(count_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min")],
)
def test_a_duration_has_the_unit_in_which_it_is_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
