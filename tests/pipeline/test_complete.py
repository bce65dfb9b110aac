"""What a command says of a run that ends badly."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import TrainingError
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import State
from pipeline.execution import complete
from pipeline.execution.work import add_to_journal
from tests.waiting import HANG_S


def test_a_failure_is_shown_while_a_slow_recorder_still_records_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(complete, "_SHOW_ERROR_AFTER_S", 0.01)
    error, said, shown = (
        TrainingError("training failed on a\n  its traceback", hint="less"),
        list[str](),
        threading.Event(),
    )

    def say(text: str) -> None:
        said.append(text)
        shown.set()

    folder = SimpleNamespace(path=tmp_path, journal=tmp_path / "journal.jsonl")
    run: Any = SimpleNamespace(folder=folder, config=SimpleNamespace(hide=str))
    add_to_journal(run, State.RUNNING, 1)
    recorder = SimpleNamespace(finish=lambda _: shown.wait(HANG_S) or pytest.fail("the recorder waits in vain"))
    work: Any = SimpleNamespace(
        run=run, say=WaitReports(say), recorder=recorder, lock=SimpleNamespace(lost=lambda: False)
    )
    complete._record_end(work, error)
    assert said == ["training failed on a\n  its traceback\n  try: less"]
    assert error.shown, "at the end its first line will do"
