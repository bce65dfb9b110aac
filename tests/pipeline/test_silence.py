"""Silence counts what was heard, and no clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pipeline.cluster.agent.running.follow import FROZEN_S
from pipeline.cluster.agent.wire import LONGEST_LOOK_S, Silence


def test_silence_counts_changes_and_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "lease"
    path.touch()
    silence = Silence(str(path))

    def look(after_s: float) -> float:
        now[0] += after_s
        return silence.look()

    assert [look(0.5), look(0.5)] == [0.5, 1.0]
    os.utime(path, (0, 0))  # the clock was set back by decades
    assert look(0.5) == 0.0
    os.utime(path, (4e9, 4e9))  # and far ahead: nothing is heard any more from here on
    assert [look(0.5), look(0.5)] == [0.0, 0.5]
    assert look(3600.0) == 0.5 + LONGEST_LOOK_S, "this process was stopped for an hour, not the controller"
    path.unlink()
    assert look(0.5) == 1.0 + LONGEST_LOOK_S


def test_a_supervisor_that_is_stopped_for_long_is_told_within_fifteen_seconds(tmp_path: Path) -> None:
    assert FROZEN_S + 2.0 < 15.0
    beat = Silence(str(tmp_path / "beat"))
    for _ in range(9):
        beat.looked -= LONGEST_LOOK_S
        beat.look()
    assert beat.seconds > FROZEN_S
