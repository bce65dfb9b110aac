"""A signal ends the run also where the exception that it raised was lost on its way."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from pipeline.core.errors import Killed
from pipeline.core.processes import signals as interrupt
from pipeline.core.processes.signals import Interruptible


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


def go_on_after_a_clean_up(*, signalled: bool) -> None:
    with Interruptible() as signals:
        signals.hold()
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        signals.release()
        if signalled:
            raise RuntimeError("it went on")
        signal.raise_signal(signal.SIGINT)


def test_a_signal_during_a_clean_up_after_which_the_work_goes_on_ends_it_there() -> None:
    with pytest.raises(Killed, match="SIGTERM") as ended:
        go_on_after_a_clean_up(signalled=True)
    assert isinstance(ended.value.__context__, interrupt.Interrupted)


def test_a_signal_after_it_ends_the_work_where_it_comes() -> None:
    with pytest.raises(Killed, match="SIGINT") as ended:
        go_on_after_a_clean_up(signalled=False)
    assert isinstance(ended.value.__context__, interrupt.Interrupted)


def test_a_ctrl_c_that_was_lost_before_a_run_lets_none_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_ctrl_c_came", False)
    before = signal.signal(signal.SIGINT, interrupt._leave)
    try:
        interrupt.begin()
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), Interruptible():
            pytest.fail("it began")
    finally:
        signal.signal(signal.SIGINT, before)
