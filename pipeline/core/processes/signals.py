"""Ctrl-C, SIGTERM and SIGHUP as one exception in the main thread, which clean-up can hold off."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from pipeline.core.errors import Killed, PacelineError

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTRL_C = "stopped by Ctrl-C; the same command continues"

_came = False
_first = 0


def leave_on_ctrl_c() -> None:
    """Until ``begin``, Ctrl-C ends this process on the spot: nothing is begun that would have to be tidied up, and an
    exception out of the middle of an import or of the composition can get lost there, or come out as another one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else nohup, or a shell's background job
        signal.signal(signal.SIGINT, _leave)


def begin() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt; one that a library has swallowed is noticed by ``check``."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)


def came() -> bool:
    """Whether Ctrl-C has come; else somebody's code has raised a KeyboardInterrupt."""
    return _came


def first() -> int:
    """The first signal that this process was asked to end by; 0 while none has come."""
    return _first


def check() -> None:
    """Raise the KeyboardInterrupt that came before but ended nothing."""
    if _came:
        raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    with suppress(Exception):  # nobody reads any more, or this very stream was being written
        sys.stdout.flush()
        print(CTRL_C, file=sys.stderr, flush=True)
    signal.raise_signal(number)
    os._exit(128 + number)  # the signal is blocked


def _raise(number: int, frame: FrameType | None) -> None:
    global _came, _first
    _came, _first = True, _first or number
    raise KeyboardInterrupt


class Interrupted(KeyboardInterrupt):
    """A signal, on its way through the stack: not an Exception, so that nothing takes it for a failure."""


class Stop:
    """The wish to end, for attempts in threads: signals reach the main thread alone, which passes them on here."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self.by = ""

    def tell(self, by: str) -> None:
        """``by`` names what wants the end, such as SIGINT."""
        self.by = self.by or by
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the end is wanted within that time."""
        return self._requested.wait(timeout_s)


class Interruptible:
    """While it is entered, the first such signal is raised wherever the main thread is; it leaves as Killed.

    After ``hold()`` signals are only noted: a second Ctrl-C must not cut the clean-up short and orphan
    what is still being ended. Outside the main thread Python delivers no signals; there ``check`` looks at ``stop``.
    ``left`` is how things stand (what the clean-up could not make sure of), and goes into the error.
    """

    def __init__(self, stop: Stop | None = None) -> None:
        self.left = ""
        self._stop = stop
        self._stopped = False
        self._before: dict[signal.Signals, Any] = {}
        self._held = False
        self._cleaning = False
        self._first: signal.Signals | None = None

    def __enter__(self) -> Interruptible:
        check()
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
            self._before = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = True  # a signal while the handlers are put back is noted as well
        for number, handler in self._before.items():
            signal.signal(number, handler)
        killed = self.killed(error)
        if killed is not None and killed is not error:
            raise killed from None

    def killed(self, error: BaseException | None) -> Killed | None:
        """What leaves the ``with`` block when ``error`` ends its body; None: no signal has ended it."""
        if isinstance(error, Killed):  # another such block, inside of this one, has said it
            return error
        if self._first is None and not self._stopped:
            return None
        by = self._first.name if self._first is not None else self._stop.by if self._stop is not None else ""
        what = f"stopped by {by}{self.left or '; no process of the run is left'}"
        if isinstance(error, PacelineError):
            what += f", after this: {error.what}"
        return Killed(what)

    def hold(self) -> None:
        """From here on signals wait for the end of the ``with`` block."""
        self._held = self._cleaning = True

    def release(self) -> None:
        """Take ``hold`` back where the clean-up was not the end: the work goes on. Raises Interrupted: a signal came
        meanwhile."""
        self._cleaning = False
        self._held = self._first is not None
        self.check()

    def check(self) -> None:
        """Raise Interrupted when ``stop`` has been told, or a signal's own exception got lost on its way; not after
        ``hold``."""
        if self._first is not None and not self._cleaning:
            raise Interrupted
        if self._stop is not None and self._stop.requested and not self._held:
            self._held = self._stopped = True
            raise Interrupted

    @property
    def caught(self) -> str:
        """The name of the signal that came; '' while none has."""
        return self._first.name if self._first is not None else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        global _first
        self._first = self._first or signal.Signals(number)
        _first = _first or number
        if not self._held:
            self._held = True
            raise Interrupted
