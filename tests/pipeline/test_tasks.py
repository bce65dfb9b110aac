"""A verb as doit runs it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from doit.exceptions import TaskError

from pipeline.cli import project
from pipeline.cli.loader import exit_with_error
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes import unexpected


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "raise Mute"])
def test_a_verb_whose_code_ends_the_process_or_says_nothing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """As a data set of another package may: with exit code 0 doit would end well, and nothing would have been done."""
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\n"
    (tmp_path / "a_verb.py").write_text(f"{mute}def train():\n    {end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_verb", raising=False)
    monkeypatch.setattr(unexpected, "_in_runs", [tmp_path])
    told = project._action(lambda: import_module("a_verb").train())()
    assert isinstance(told, TaskError)
    what = "SystemExit: 0" if "Exit" in end else "Mute: (its text could not be made: ValueError)"
    assert told.message.startswith(f"unexpected {what} at a_verb.py:5 ")


def test_an_error_that_stands_above_already_is_said_again_in_short_with_what_mends_it() -> None:
    def fail() -> None:
        error = PacelineError("training failed on node1, rank 0: " + "x" * 300 + "\nlogs: a", hint="a smaller batch")
        error.shown = True
        raise error

    message, mend = project._action(fail)().message.splitlines()
    assert message == f"training failed on node1, rank 0: {'x' * 206}… (the whole error is above)"
    assert mend == "  try: a smaller batch"


def test_an_error_of_one_line_is_not_said_to_be_whole_elsewhere() -> None:
    def fail() -> None:
        error = PacelineError("training failed on node1: killed", hint="a smaller batch")
        error.shown = True
        raise error

    assert project._action(fail)().message == "training failed on node1: killed\n  try: a smaller batch"


def test_a_wrong_word_keeps_its_exit_code_where_tasks_run_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        exit_with_error(UsageError("there is no step 'b'"))
    handed_over = type(left.value)(str(left.value))  # what doit -n makes of it in its own process
    assert (handed_over.code, capsys.readouterr().err) == (3, "ERROR: there is no step 'b'\n")
