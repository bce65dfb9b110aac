"""Turn Ctrl-C, SIGTERM, SIGHUP and the end of ``--budget`` into exceptions that unwind a command in order.

A command starts with ``leave_on_ctrl_c``, while nothing needs clean-up. From ``begin`` on Ctrl-C raises
KeyboardInterrupt. During an attempt an ``Interruptible`` block turns each of the signals into Interrupted, lets
clean-up defer them, and leaves the block as Killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from pipeline.core.errors import Killed, PacelineError

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
CTRL_C = "stopped by Ctrl-C; the same command continues"

_ctrl_c_came = False
_first_signal = 0
_budget = ""  # as typed behind --budget


def leave_on_ctrl_c() -> None:
    """Let Ctrl-C end this process immediately until ``begin`` is called, because nothing needs clean-up yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored: nohup, a background job
        signal.signal(signal.SIGINT, _leave)


def begin() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on; ``check`` detects one that a library swallowed."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)


def ctrl_c_came() -> bool:
    """Return True if Ctrl-C came; otherwise user code raised the KeyboardInterrupt."""
    return _ctrl_c_came


def limit_duration(seconds: float, budget: str) -> None:
    """Let SIGALRM end this command in order after ``seconds``. ``budget``: as it was typed, for the message."""
    global _budget
    _budget = budget
    signal.signal(signal.SIGALRM, _raise_killed)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def first_signal() -> int:
    """Return the first signal that asked this process to end; 0 if none."""
    return _first_signal


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C came earlier and a library swallowed the exception."""
    if _ctrl_c_came:
        raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    with suppress(Exception):  # the reader is gone, or the signal interrupted a write to this stream
        sys.stdout.flush()
        print(CTRL_C, file=sys.stderr, flush=True)
    signal.raise_signal(number)
    os._exit(128 + number)  # the signal is blocked


def _raise(number: int, frame: FrameType | None) -> None:
    global _ctrl_c_came, _first_signal
    _ctrl_c_came, _first_signal = True, _first_signal or number
    raise KeyboardInterrupt


def _raise_killed(number: int, frame: FrameType | None) -> None:
    """Handle SIGALRM outside of ``Interruptible``."""
    global _first_signal
    _first_signal = _first_signal or number
    raise Killed(f"stopped by {_origin(signal.SIGALRM)}", hint="the same command goes on")


def _origin(number: signal.Signals) -> str:
    return f"--budget {_budget}" if number == signal.SIGALRM else number.name


class Interrupted(KeyboardInterrupt):
    """A signal on its way up the stack. Not an Exception, so that no handler treats it as a failure."""


class Stop:
    """A request to end for attempts in threads: signals reach only the main thread, which forwards them here."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self.by = ""

    def request(self, by: str) -> None:
        """Request the end; ``by`` names its origin, such as SIGINT or ``--budget 30m``."""
        self.by = self.by or by
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Return True if the end is requested within ``timeout_s``."""
        return self._requested.wait(timeout_s)


class Interruptible:
    """Context manager: the first signal raises Interrupted in the main thread, and the block ends with Killed.

    After ``hold()`` signals are only recorded: a second Ctrl-C must not cut the clean-up short and orphan processes.
    Python delivers signals only to the main thread. In other threads the body must call ``check`` often, which raises
    Interrupted if ``stop`` was requested.
    """

    def __init__(self, stop: Stop | None = None) -> None:
        # The end of the message of Killed: what is left after the clean-up. "": no process of the run is left.
        self.message_end = ""
        self._stop = stop
        self._stopped = False  # Interrupted was raised because of ``stop``
        self._before: dict[signal.Signals, Any] = {}  # the handlers outside of the block
        self._held = False  # a further signal raises nothing
        self._cleaning = False  # between ``hold`` and ``release``
        self._first: signal.Signals | None = None

    def __enter__(self) -> Interruptible:
        check()
        if threading.current_thread() is threading.main_thread():
            # a signal that is ignored stays so: nohup ignores SIGHUP
            numbers = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = True  # only record signals while the handlers are restored
        for number, handler in self._before.items():
            signal.signal(number, handler)
        killed = self.killed(error)
        if killed is not None and killed is not error:
            raise killed from None

    def killed(self, error: BaseException | None) -> Killed | None:
        """Return the error to raise at the end of the block, whose body ended with ``error``; None: no signal came."""
        if isinstance(error, Killed):  # a nested block raised it
            return error
        if self._first is None and not self._stopped:
            return None
        by = self.caught or (self._stop.by if self._stop is not None else "")
        what = f"stopped by {by}{self.message_end or '; no process of the run is left'}"
        if isinstance(error, PacelineError):
            what += f", after this: {error.what}"
        return Killed(what)

    def hold(self) -> None:
        """Defer signals to the end of the ``with`` block from now on."""
        self._held = self._cleaning = True

    def release(self) -> None:
        """Undo ``hold`` if the work goes on after the clean-up. Raises Interrupted: a signal came meanwhile."""
        self._cleaning = False
        self._held = self._first is not None
        self.check()

    def check(self) -> None:
        """Raise Interrupted if ``stop`` was requested or a signal's exception was swallowed; not after ``hold``."""
        if self._first is not None and not self._cleaning:
            raise Interrupted
        if self._stop is not None and self._stop.requested and not self._held:
            self._held = self._stopped = True
            raise Interrupted

    @property
    def caught(self) -> str:
        """The name of the received signal, or ``--budget 30m``; '' if none came."""
        return _origin(self._first) if self._first is not None else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        global _first_signal
        self._first = self._first or signal.Signals(number)
        _first_signal = _first_signal or number
        if not self._held:
            self._held = True
            raise Interrupted
