"""A script's line as Python's train and sweep take it."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.notebook.commands import _script_line


@pytest.mark.parametrize(
    ("typed", "fields", "words"),
    [
        (("run train.py --epochs 3",), {"lr": 0.1, "fast": True}, "run train.py --epochs 3 --lr 0.1 --fast"),
        (("torchrun", "train.py"), {"lr": [0.1, 0.01]}, "torchrun --sweep lr=0.1,0.01 train.py"),
        (("experiment=quickstart",), {"lr": 0.1}, ""),
        ((), {"lr": 0.1}, ""),
    ],
)
def test_fields_are_options_of_the_script_and_lists_are_swept(
    typed: tuple[str, ...], fields: dict[str, Any], words: str
) -> None:
    assert _script_line(typed, fields) == words.split()
