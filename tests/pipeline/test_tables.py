"""Numbers as people read them."""

from __future__ import annotations

import pytest

from pipeline.core.tables import aligned, columns, duration, file_size, in_width, quantity, wrapped


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


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("tokens", 8134010.0, "8,134,010"),
        ("gpu/peak_bytes", 8134010.0, "8.1 MB"),
        ("train_s", 125.0, "2 min 05 s"),
        ("epoch_seconds", 7261.0, "2 h 01 min"),
        ("train_s", 0.25160, "0.2516"),
        ("images_per_s", 17462.31, "17462.3"),
        ("loss", 6.75987e-14, "6.75987e-14"),
        ("loss", float("nan"), "nan"),
        ("grad_norm", 1e300, "1e+300"),
    ],
)
def test_a_figure_has_the_unit_that_its_name_tells(name: str, value: float, shown: str) -> None:
    assert quantity(name, value) == shown


def test_a_wide_character_counts_two_columns_and_a_combining_one_none() -> None:
    assert aligned([("猫", "1"), ("a", "2"), ("e\u0301", "3")]).splitlines() == ["猫  1", "a   2", "e\u0301   3"]
    assert wrapped("  model.name=青蛙 lr=0.1", 20) == ["  model.name=青蛙", "      lr=0.1"]
    assert max(map(columns, wrapped("青蛙 " * 20, 11))) <= 11


def test_a_table_goes_on_below_and_is_a_block_a_row_where_not_two_columns_fit() -> None:
    rows = [("name", "n", "accuracy"), ("a", "1", "0.5"), ("b", "2", "0.6")]
    assert in_width(rows, 18) == ["name  n  accuracy", "a     1  0.5", "b     2  0.6"]
    assert in_width(rows, 14) == ["name  n", "a     1", "b     2", "", "name  accuracy", "a     0.5", "b     0.6"]
    assert in_width([rows[0], ("a long one", "1", "0.5")], 18) == ["a long one", "  n         1", "  accuracy  0.5"]
