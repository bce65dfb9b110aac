"""A signal ends the run also where the exception that it raised was lost on its way."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from pipeline.core import signals as interrupt
from pipeline.core.errors import Killed
from pipeline.core.signals import Interruptible


def look_after_a_lost_signal(*, cleaning: bool) -> None:
    with Interruptible() as signals:
        if cleaning:
            signals.hold()
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        signals.check()
        raise RuntimeError("it went on")


def test_a_swallowed_interruption_is_raised_again_at_the_next_look() -> None:
    with pytest.raises(Killed) as ended:
        look_after_a_lost_signal(cleaning=False)
    assert isinstance(ended.value.__context__, interrupt.Interrupted), "where it looked, not at the end"


def test_clean_up_is_not_interrupted_by_a_look() -> None:
    with pytest.raises(Killed) as ended:
        look_after_a_lost_signal(cleaning=True)
    assert isinstance(ended.value.__context__, RuntimeError), "it went on, and was told at the end"


def test_a_ctrl_c_that_was_lost_before_a_run_lets_none_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_came", False)
    before = signal.signal(signal.SIGINT, interrupt._leave)
    try:
        interrupt.begin()
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), Interruptible():
            pytest.fail("it began")
    finally:
        signal.signal(signal.SIGINT, before)
