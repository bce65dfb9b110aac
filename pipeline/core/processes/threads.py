"""Threads of the controller half, and reports of long waits.

Every exception in a thread is reported, so that none ends silently. No other module of this half starts threads.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pipeline.core.errors import text_of
from pipeline.core.processes import unexpected
from pipeline.core.specs import Wait

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_PER_WORKER = 2  # items per worker: one in progress, one waiting


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], *, workers: int) -> Iterator[_Result]:
    """Like ``map``, with ``workers`` threads that work on a bounded number of items in advance.

    An exception of the function is raised in the place of its result; items that no worker has started are dropped.
    """
    waiting: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="in-order")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= workers * _PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def new(
    target: Callable[..., None], *args: object, name: str, on_error: Callable[[str], None], daemon: bool = True
) -> threading.Thread:
    """Create a thread that calls ``target(*args)`` once started; the process doesn't wait for a ``daemon``.

    ``on_error`` is called in the new thread with one line about any exception. If another thread waits for this one's
    result, ``on_error`` must wake it.
    """
    return threading.Thread(target=_run, args=(target, args, on_error), name=name, daemon=daemon)


def start(
    target: Callable[..., None], *args: object, name: str, on_error: Callable[[str], None], daemon: bool = True
) -> threading.Thread:
    """Create a thread like ``new`` and start it."""
    thread = new(target, *args, name=name, on_error=on_error, daemon=daemon)
    thread.start()
    return thread


def after(delay_s: float, target: Callable[[], None], *, name: str) -> threading.Timer:
    """Call ``target`` in ``delay_s`` seconds unless the timer is cancelled; exceptions go to stderr."""
    timer = threading.Timer(delay_s, _run, args=(target, (), lambda text: print(text, file=sys.stderr)))
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def _run(target: Callable[..., None], args: tuple[object, ...], on_error: Callable[[str], None]) -> None:
    try:
        target(*args)
    except BaseException as error:
        try:
            on_error(f"{described(error)}; the traceback: {unexpected.keep_traceback(error)}")
        except BaseException:  # on_error failed too: print both tracebacks
            traceback.print_exc()


def described(error: BaseException) -> str:
    """Return an unexpected error on one line with its place: ``ValueError: invalid literal (streams.py:123)``."""
    frames = traceback.extract_tb(error.__traceback__)
    return named(error) + (f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "")


def named(error: BaseException) -> str:
    """Return the error on one line: ``ValueError: invalid literal``."""
    text = text_of(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


# ------------------------------------------------------------------------------- reports of waits
EVERY_S = 5.0
_LONGEST_PAUSES = 12  # the longest pause between two reports, in units of every_s
_ON_WAIT_S = 1.0  # between two calls of on_wait


class WaitReports:
    """Print lines with ``say``; after ``every_s`` without a line, report what is waited for (``doing``).

    Use it as a context manager around the work, and call it with each line; any thread may do so. The pauses between
    reports double until another line is printed. With ``on_wait`` (a live view) no report is printed; instead
    ``on_wait`` is called each second with what is waited for.
    """

    def __init__(
        self, say: Callable[[str], None], every_s: float = EVERY_S, *, on_wait: Callable[[Wait], None] | None = None
    ) -> None:
        self._say, self._every_s, self._on_wait = say, every_s, on_wait
        self._activity: Callable[[], str] = lambda: "working"
        self._printed_at = self._began_at = time.monotonic()
        self._pause_s = every_s
        self._over = threading.Event()

    def __call__(self, text: str) -> None:
        self._printed_at, self._pause_s = time.monotonic(), self._every_s
        self._say(text)

    def doing(self, activity: str | Callable[[], str]) -> None:
        """Set what is waited for: words that follow "still", or a function that returns them when needed."""
        self._activity = activity if callable(activity) else lambda: activity
        self._began_at, self._pause_s = time.monotonic(), self._every_s

    def __enter__(self) -> WaitReports:
        start(self._report, name="wait reports", on_error=self._say)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _report(self) -> None:
        while self._on_wait is not None and not self._over.wait(_ON_WAIT_S):
            self._on_wait(Wait(what=self._activity(), for_s=time.monotonic() - self._began_at))
        # at least every ``every_s``, because a line or ``doing`` may have shortened the pause meanwhile
        while not self._over.wait(max(0.05, min(self._every_s, self._printed_at + self._pause_s - time.monotonic()))):
            if time.monotonic() - self._printed_at >= self._pause_s:
                # computed before the line is printed, because printing resets the pause
                longer_s = min(2 * self._pause_s, _LONGEST_PAUSES * self._every_s)
                self(f"still {self._activity()} ({time.monotonic() - self._began_at:.0f} s)")
                self._pause_s = longer_s


@contextmanager
def waiting(say: Callable[[str], None], activity: str) -> Iterator[None]:
    """Report ``activity`` (words that follow "still") every five seconds while the block runs."""
    with WaitReports(say) as reports:
        reports.doing(activity)
        yield
