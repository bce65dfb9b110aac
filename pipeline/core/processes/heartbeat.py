"""A line after five seconds of silence: what a command is waiting for, so that nobody takes it for dead.

While nothing else is said the next ones come after 10, 20, 40 and then every 60 seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.core.processes import threads
from pipeline.core.specs import Waiting

if TYPE_CHECKING:
    from pipeline.core.specs import Waiting

EVERY_S = 5.0
_LONGEST = 12  # times EVERY_S
_SHOWN_S = 1.0


class Heartbeat:
    """Passes lines on to ``say``; after ``every_s`` without one it says what ``doing`` was given last, then ever more
    rarely until something else is said.

    Used as a context manager around the work. Callable from any thread.

    Args:
        on_wait: for a view: told each second what is waited for and since when, in place of those lines.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = EVERY_S,
        *,
        on_wait: Callable[[Waiting], None] | None = None,
    ) -> None:
        self._say, self._every_s, self._on_wait = say, every_s, on_wait
        self._what: Callable[[], str] = lambda: "working"
        self._heard = self._since = time.monotonic()
        self._pause_s = every_s
        self._over = threading.Event()

    def __call__(self, text: str) -> None:
        self._heard, self._pause_s = time.monotonic(), self._every_s
        self._say(text)

    def doing(self, what: str | Callable[[], str]) -> None:
        """``what`` is waited for from now on: words that follow "still", or what makes them when they are needed."""
        self._what = what if callable(what) else lambda: what
        self._since, self._pause_s = time.monotonic(), self._every_s

    def __enter__(self) -> Heartbeat:
        threads.start(self._beat, name="heartbeat", on_error=self._say)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _beat(self) -> None:
        while self._on_wait is not None and not self._over.wait(_SHOWN_S):
            self._on_wait(Waiting(what=self._what(), for_s=time.monotonic() - self._since))
        while not self._over.wait(max(0.05, min(self._every_s, self._heard + self._pause_s - time.monotonic()))):
            if time.monotonic() - self._heard >= self._pause_s:
                longer_s = min(2 * self._pause_s, _LONGEST * self._every_s)
                self(f"still {self._what()} ({time.monotonic() - self._since:.0f} s)")
                self._pause_s = longer_s


@contextmanager
def waiting(say: Callable[[str], None], what: str) -> Iterator[None]:
    """For work that is mostly quick: after each five seconds inside a line with ``what``, words that follow "still"."""
    with Heartbeat(say) as heartbeat:
        heartbeat.doing(what)
        yield
