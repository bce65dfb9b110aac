"""Which lines of the ranks are shown while they come, where some of them are tracebacks."""

from __future__ import annotations

import pytest

from pipeline.cluster.attempt.failures import HeldTracebacks, is_worth_showing, shortened
from pipeline.cluster.events import LogLine

UNCAUGHT = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f()", "E: a", "", "b"]
CAUGHT = [
    *UNCAUGHT[:4], "", "During handling of the above exception, another exception occurred:", "", *UNCAUGHT[:3], "E: b"
]  # fmt: skip


def shown(*lines: tuple[int, str]) -> tuple[list[str], list[str]]:
    """What is shown while the lines come, and what after a good end."""
    seen: list[str] = []
    tracebacks = HeldTracebacks(lambda line: seen.append(f"{line.rank} {line.text}"))
    for rank, text in lines:
        tracebacks.add(LogLine(host="node0", rank=rank, text=text))
    before = [*seen]
    tracebacks.release()
    return before, seen[len(before) :]


def test_an_exception_that_ends_a_rank_is_held_back_while_other_ranks_are_shown() -> None:
    lines = [(rank, f"[rank{rank}]: {text}") for text in UNCAUGHT for rank in (0, 1)]
    assert shown((0, "epoch 1"), *lines, (2, "epoch 1"), (0, "bye"))[0] == ["0 epoch 1", "2 epoch 1", "0 bye"]


def test_a_traceback_that_the_program_has_caught_is_shown_as_soon_as_the_rank_says_something_else() -> None:
    assert shown(*((0, text) for text in [*CAUGHT, "epoch 1"]))[0] == [*(f"0 {text}" for text in CAUGHT), "0 epoch 1"]


def test_an_error_that_the_trainer_explains_is_left_to_the_end_of_the_attempt() -> None:
    lines = [(0, "paceline: error: trainer.loss=a:b returned [2]"), (0, "a number was needed")]
    assert shown(*lines, (1, "epoch 1")) == (["1 epoch 1"], [f"0 {text}" for _, text in lines])


@pytest.mark.parametrize(
    ("rank", "text", "shown"),
    [
        (0, "epoch 1", True),
        (None, "W1122 torch/distributed/run.py: setting OMP_NUM_THREADS", False),
        (None, "paceline: torchrun is at 10.0.0.1:29500", False),
        (None, "paceline: WARNING: loss was nan", True),
    ],
)
def test_of_what_no_rank_says_only_a_warning_is_shown(rank: int | None, text: str, shown: bool) -> None:
    assert is_worth_showing(LogLine(host="node0", rank=rank, text=text)) is shown


def test_the_lines_of_a_script_are_shown_from_its_own_copy_of_the_snapshot() -> None:
    frames = [
        ("/r/0123/work/node1/above/above/code/sub/t.py", "main()"),
        ("/usr/lib/x.py", "inner()"),
        ("/usr/lib/y.py", "raise"),
    ]
    text = "Traceback:\n" + "".join(f'  File "{path}", line 3, in f\n    {line}\n' for path, line in frames)
    assert shortened(text, "0123") == (
        'Traceback:\n  File "sub/t.py", line 3, in f\n    main()\n  File "/usr/lib/y.py", line 3, in f\n    raise'
    )
