from __future__ import annotations

import io
import sys
import time

import pytest

from pipeline.data import progress


def test_a_log_gets_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with progress.reporting(None) as report:
        for now_s[0] in (1.0, 4.0, 6.0, 7.0, 12.0):
            report("download x.gz", int(now_s[0] * 1e6), 20_000_000)
        now_s[0] = 20.0
        report("unpack", 3_000_000, None)
    assert capsys.readouterr().err.splitlines() == [
        "download x.gz: 6.0 MB of 20.0 MB (30%)",
        "download x.gz: 12.0 MB of 20.0 MB (60%)",
        "unpack: 3.0 MB",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.reporting(None) as report:
        report("download x.gz", 10_000_000, 20_000_000)
    assert "download x.gz" in terminal.getvalue()
    assert "10.0/20.0 MB" in terminal.getvalue()


def test_a_caller_s_own_function_gets_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    with progress.reporting(lambda *line: seen.append(line)) as report:
        report("pack", 1, None)
    assert seen == [("pack", 1, None)]
    assert capsys.readouterr().err == ""
