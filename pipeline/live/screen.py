"""The thread that writes progress to stderr: lines, and below them a view that is redrawn each second.

Other threads only leave their lines here. So a terminal that accepts nothing (Ctrl-S, a pager) blocks this thread
alone.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TextIO

from pipeline.core.printable import program_lines, takes_colours, without_host
from pipeline.core.processes import threads
from pipeline.core.specs import Waiting
from pipeline.core.tables import columns, folded
from pipeline.live.state import Said
from trainers.contract.beats import NodeBeat

FRAME_S = 0.5  # between two looks for something new; a view without news is drawn once a second
_STILL_S = 1.0
_EPOCH = re.compile(r"(?:trial +\d+ \| )?(?:\S+:\d+ \| )?epoch +\d")
_NEEDLESS = (re.compile(r"step +[\d,]+/[\d,]+"), re.compile(r"[\d,]+ images/s"))
_LEAST_WIDTH = 20  # columns; in fewer nothing could be read
_USUAL_WIDTH = 80


class Picture(Protocol):
    """The content of a view: takes events, looks for news itself before each frame; ``views.view`` draws its state."""

    state: Any

    def take(self, event: Any, now: float) -> None: ...
    def look(self, now: float) -> None: ...


def is_live(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a view can be drawn: on a terminal that moves its cursor, but not in CI, whose log keeps each frame."""
    term = environment.get("TERM", "")
    return stream.isatty() and bool(term) and term not in ("dumb", "unknown") and not environment.get("CI")


def plain_width(stream: TextIO, environment: Mapping[str, str]) -> int | None:
    """Return the width in columns at which lines are folded: the terminal's, unless COLUMNS is set.

    None: not at all, because lines in files and programs are searched and copied whole.
    """
    if not stream.isatty():
        return None
    columns = environment.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return _USUAL_WIDTH


@dataclass
class _News:
    """Lines and events to be written.

    Of events that come each second only the ``newest`` is kept, as a terminal may be stopped for hours.
    """

    texts: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    newest: dict[Any, Any] = field(default_factory=dict)


class Screen:
    """A context manager around the work; its end waits until all lines are written.

    Lines are folded at the terminal's width above ``picture``, without one at ``width``. ``wanted`` decides which are
    shown; ``as_typed`` returns a line with its commands as the user types them.
    """

    def __init__(
        self,
        picture: Picture | None = None,
        *,
        width: int | None = None,
        wanted: Callable[[str], bool] = lambda _: True,
        as_typed: Callable[[str], str] = str,
    ) -> None:
        self._picture, self._width, self._wanted, self._as_typed = picture, width, wanted, as_typed
        self._news, self._lock = _News(), threading.Lock()
        self._woken = threading.Event()
        self._over = self._broken = False
        self._thread: threading.Thread | None = None

    @property
    def is_live(self) -> bool:
        """Whether it draws a view."""
        return self._picture is not None

    def say(self, text: str) -> None:
        """Write a line, or several. Never waits for the terminal."""
        if self._wanted(text) and not self._broken:
            with self._lock:
                self._news.texts.append(self._as_typed(text))
            self._woken.set()

    def tell(self, event: Any) -> None:
        """Pass an event to the view; of a trial, in a pair with its number. Never waits."""
        if self._picture is None or self._broken:
            return
        of, bare = event if type(event) is tuple else (None, event)  # records are tuples too
        with self._lock:
            if isinstance(bare, NodeBeat):
                self._news.newest[of, bare.host] = event
            elif isinstance(bare, Waiting):
                self._news.newest[of, Waiting] = event
            else:
                self._news.events.append(event)

    def __enter__(self) -> Screen:
        write = self._draw if self._picture is not None else self._write
        self._thread = threads.start(write, name="terminal", on_error=self._failed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------- in the thread
    def _taken(self) -> _News:
        self._woken.clear()
        with self._lock:
            news, self._news = self._news, _News()
        return news

    def _write(self) -> None:
        while True:
            self._woken.wait()
            news, over = self._taken(), self._over  # in this order, or the wake-up of __exit__ might be cleared unseen
            for text in news.texts:
                print(_shown(text, self._width), file=sys.stderr, flush=True)
            if over and not self._news.texts:
                return

    def _draw(self) -> None:
        from pipeline.live import views  # not before: rich, which nobody without a terminal pays for

        picture, drawn = self._picture, 0.0
        assert picture is not None
        with views.shown(lambda: picture.state, colours=takes_colours(sys.stderr, os.environ)) as live:
            while True:
                over, news, now = self._over, self._taken(), time.monotonic()
                for event in (*news.events, *news.newest.values(), *(Said(text=text) for text in news.texts)):
                    picture.take(event, now)
                if news.texts or now - drawn >= _STILL_S:
                    picture.look(now)
                    drawn = now
                    if news.texts:
                        views.print_above(live, [_shown(text, live.console.width) for text in news.texts])
                    else:
                        live.refresh()
                if over and not self._news.texts:
                    return
                while not (over or self._over) and time.monotonic() < now + FRAME_S:
                    time.sleep(0.05)

    def _failed(self, why: str) -> None:
        """Stop writing: stderr is gone. The work continues, and the logs have its lines."""
        self._broken = True
        with suppress(OSError, ValueError):
            print(f"WARNING: nothing more is shown here, and the work goes on: {why}", file=sys.stderr, flush=True)


def _shown(text: str, width: int | None) -> str:
    """Format lines for stderr. ``width``: None if it is no terminal."""
    colours = takes_colours(sys.stderr, os.environ)
    text = program_lines(without_host(text), terminal=width is not None, colours=colours)
    if width is None:
        return text
    width = max(_LEAST_WIDTH, width)
    return folded("\n".join(epoch_fitted(line, width) for line in text.split("\n")), width)


def epoch_fitted(line: str, width: int) -> str:
    """Drop dispensable parts of a rank's line about an epoch if it is wider than the terminal."""
    if not _EPOCH.match(line):
        return line
    parts = line.split("  ")
    for needless in _NEEDLESS:
        if columns("  ".join(parts)) <= width:
            break
        parts = [part for part in parts if not needless.fullmatch(part)]
    return "  ".join(parts)
