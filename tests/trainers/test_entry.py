"""What a rank's entry makes of the ways in which a training can end."""

from __future__ import annotations

import pytest

from trainers.entry import marked, recordable


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SystemExit(0), "SystemExit: 0 (it ends a process, and the run was not over; raise an Exception"),
        (KeyboardInterrupt(), "KeyboardInterrupt: (it ends a process, and the run was not over; raise an Exception"),
        (GeneratorExit("x"), "GeneratorExit: x (it ends a process, and the run was not over; raise an Exception"),
    ],
)  # fmt: skip
def test_what_ends_a_process_is_recorded_by_its_name(error: BaseException, shown: str) -> None:
    told = recordable(error)
    assert f"{type(told).__name__}: {told}".startswith(shown)
    assert type(told).__module__ == type(error).__module__


def test_all_lines_of_an_error_carry_the_rank_so_that_they_are_known_to_belong_together() -> None:
    assert marked("Traceback …\nValueError: one\n\ntwo\n", 3).split("\n") == [
        "[rank3]: Traceback …",
        "[rank3]: ValueError: one",
        "[rank3]: ",
        "[rank3]: two",
    ]
