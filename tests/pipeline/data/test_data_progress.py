from __future__ import annotations

import io
import queue
import sys

import pytest

from pipeline.core.processes import threads
from pipeline.data import progress
from tests.waiting import HANG_S


@pytest.mark.slow
def test_a_log_gets_a_line_every_few_seconds_also_while_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Log(io.StringIO):
        def write(self, text: str) -> int:
            lines.put(text)
            return len(text)

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(sys, "stderr", Log())
    monkeypatch.setattr(threads.WaitReports.__init__, "__defaults__", (0.05,))

    def next_line(after: str) -> str:
        """The first that isn't ``after``, without its seconds."""
        while (line := lines.get(timeout=HANG_S).partition(" (")[0]) in (after, "\n"):
            pass
        return line

    with progress.reporting(None) as report:
        assert (first := next_line("")) == "still preparing the data"
        report("downloading x.gz", 6_000_000, 20_000_000)
        assert (second := next_line(first)) == "still downloading x.gz: 6.0 MB of 20.0 MB"
        report("unpacking x.gz", 3_000_000, None)
        assert (third := next_line(second)) == "still unpacking x.gz: 3.0 MB"
        report("hashing x", 0, None)
        assert next_line(third) == "still hashing x"
