"""Ctrl-C, SIGTERM and SIGHUP as one exception in the main thread, which clean-up can hold off."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pipeline.errors import Killed

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptible:
    """While it is entered, the first such signal raises Killed wherever the main thread is.

    After ``hold()`` signals are only noted: a second Ctrl-C must not cut the clean-up short and orphan
    what is still being ended. Outside the main thread it does nothing (Python delivers signals there).
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._held = False
        self._noted: Killed | None = None

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._noted is not None and not isinstance(error, Killed):
            raise self._noted from error

    def hold(self) -> None:
        """From here on signals wait."""
        self._held = True

    def release(self) -> None:
        """A signal that came while held is raised now. Raises Killed."""
        self._held = False
        if self._noted is not None:
            noted, self._noted = self._noted, None
            raise noted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        error = Killed(f"stopped by {signal.Signals(number).name}; no process of the run is left on any host")
        if self._held:
            self._noted = error
            return
        self._held = True
        raise error
