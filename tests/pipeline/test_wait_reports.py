"""A command that waits says so."""

from __future__ import annotations

import re
import threading
import time

import pytest

from pipeline.core.processes import threads
from pipeline.core.processes.threads import WaitReports, waiting
from tests.waiting import HANG_S


def test_a_long_silence_is_filled_ever_more_rarely_until_a_line_comes() -> None:
    said: list[tuple[float, str]] = []
    third = threading.Event()

    def hear(text: str) -> None:
        said.append((time.monotonic(), text))
        if len(said) == 3:
            third.set()

    with WaitReports(hear, every_s=0.1) as reports:
        reports.doing("running the script")
        assert third.wait(HANG_S)
        reports("step 50 loss 0.3")
        assert reports._pause_s == 0.1
    (first, _), (second, _), (last, _) = said[:3]
    assert second - first >= 0.19
    assert last - second >= 0.39


def test_quick_work_says_nothing_and_slow_work_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with waiting(said.append, "packing the archive"):
        pass
    assert said == []
    monkeypatch.setattr(threads.WaitReports.__init__, "__defaults__", (0.05,))
    told = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        told.set()

    with waiting(hear, "packing the archive"):
        assert told.wait(HANG_S)
    assert re.fullmatch(r"still packing the archive \(\d+ s\)", said[0])
