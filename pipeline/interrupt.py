"""Ctrl-C, SIGTERM and SIGHUP as one exception in the main thread, which clean-up can hold off."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pipeline.errors import Killed, PacelineError

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal, on its way through the stack: not an Exception, so that nothing takes it for a failure."""


class Interruptible:
    """While it is entered, the first such signal is raised wherever the main thread is; it leaves as Killed.

    After ``hold()`` signals are only noted: a second Ctrl-C must not cut the clean-up short and orphan
    what is still being ended. Outside the main thread it does nothing (Python delivers signals there).
    ``left`` is what the clean-up could not make sure of, and stands in the error.
    """

    def __init__(self) -> None:
        self.left = ""
        self._before: dict[signal.Signals, Any] = {}
        self._held = False
        self._first: signal.Signals | None = None

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
            self._before = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._first is None:
            return
        what = f"stopped by {self._first.name}{self.left or '; no process of the run is left'}"
        if isinstance(error, PacelineError):
            what += f", after this: {error.what}"
        raise Killed(what) from None

    def hold(self) -> None:
        """From here on signals wait for the end of the ``with`` block."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._first = self._first or signal.Signals(number)
        if not self._held:
            self._held = True
            raise Interrupted
