"""Report what a command waits for after five seconds without output.

Further lines follow after 10, 20, 40 and then every 60 seconds, as long as nothing else is printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pipeline.core.processes import threads
from pipeline.core.specs import Wait

EVERY_S = 5.0
_LONGEST = 12  # times EVERY_S
_SHOWN_S = 1.0  # between two calls of on_wait


class WaitReports:
    """Print lines with ``say``; after ``every_s`` without a line, report the activity last given to ``doing``.

    The pauses between reports double until another line is printed. Use it as a context manager around the work, and
    call it with each line; any thread may do so.

    Args:
        on_wait: called every second with the current wait instead of printing, for a live view.
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
        threads.start(self._report, name="wait reports", on_error=self._say)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _report(self) -> None:
        while self._on_wait is not None and not self._over.wait(_SHOWN_S):
            self._on_wait(Wait(what=self._activity(), for_s=time.monotonic() - self._began_at))
        while not self._over.wait(max(0.05, min(self._every_s, self._printed_at + self._pause_s - time.monotonic()))):
            if time.monotonic() - self._printed_at >= self._pause_s:
                longer_s = min(2 * self._pause_s, _LONGEST * self._every_s)  # before the line, which resets the pause
                self(f"still {self._activity()} ({time.monotonic() - self._began_at:.0f} s)")
                self._pause_s = longer_s


@contextmanager
def waiting(say: Callable[[str], None], activity: str) -> Iterator[None]:
    """Report ``activity`` (words that follow "still") every five seconds while the block runs."""
    with WaitReports(say) as reports:
        reports.doing(activity)
        yield
