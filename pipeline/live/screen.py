"""The thread that writes a command's progress to stderr: lines, and below them a view that is redrawn each second.

Other threads only queue lines and events. So a terminal that accepts no output (Ctrl-S, a pager) blocks this thread
alone, never the training. Without a terminal only the lines are written.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pipeline.core.printable import program_lines, takes_colours, without_host
from pipeline.core.processes import threads
from pipeline.core.specs import Wait
from pipeline.core.tables import folded
from pipeline.live.state import RunState, ShownLine
from trainers.contract.beats import NodeBeat

if TYPE_CHECKING:
    from pipeline.live.sweep_state import SweepState

FRAME_S = 0.5  # between two readings of the queue
_REDRAW_S = 1.0  # the view is drawn again after this time even if no line was added
_LEAST_WIDTH = 20  # columns; text folded in fewer could not be read
_USUAL_WIDTH = 80  # if the terminal doesn't know its width


class Picture(Protocol):
    """The content of the view: a state, which ``views.view`` draws.

    ``apply`` changes it by an event; ``read_files``, called before each frame, by what was added to the run folder.
    """

    @property
    def state(self) -> RunState | SweepState: ...

    def apply(self, event: Any, now: float) -> None: ...
    def read_files(self, now: float) -> None: ...


def is_live(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if a view can be drawn: on a terminal that moves its cursor. A log of CI would keep each frame."""
    term = environment.get("TERM", "")
    return stream.isatty() and bool(term) and term not in ("dumb", "unknown") and not environment.get("CI")


def plain_width(stream: TextIO, environment: Mapping[str, str]) -> int | None:
    """Return the width in columns at which lines are folded: the terminal's, unless COLUMNS is set.

    None if the stream is no terminal: lines in files and programs are searched and copied whole.
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
class _Queue:
    """What other threads want to have written."""

    lines: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    # (trial, host or kind) → newest event. These events come each second, and a terminal may be stopped for hours.
    newest: dict[Any, Any] = field(default_factory=dict)


class Screen:
    """Writes lines, and a view below them, while its context lasts; its end waits until all lines are written.

    Args:
        picture: the content of the view; None: only lines.
        width: the columns at which lines are folded without a view (with one: the terminal's width); None: not folded.
        is_shown: chooses the lines that are written.
        as_typed: returns a line with its commands as the user types them.
    """

    def __init__(
        self,
        picture: Picture | None = None,
        *,
        width: int | None = None,
        is_shown: Callable[[str], bool] = lambda _: True,
        as_typed: Callable[[str], str] = str,
    ) -> None:
        self._picture, self._width, self._is_shown, self._as_typed = picture, width, is_shown, as_typed
        self._queue, self._lock = _Queue(), threading.Lock()
        self._woken = threading.Event()
        self._is_over = self._is_broken = False
        self._thread: threading.Thread | None = None

    @property
    def is_live(self) -> bool:
        """True if it draws a view."""
        return self._picture is not None

    def say(self, text: str) -> None:
        """Write a line, or several. Never waits for the terminal."""
        if self._is_shown(text) and not self._is_broken:
            with self._lock:
                self._queue.lines.append(self._as_typed(text))
            self._woken.set()

    def show_event(self, event: Any) -> None:
        """Pass an event to the view; an event of a trial comes as (trial number, event). Never waits."""
        if self._picture is None or self._is_broken:
            return
        trial, of_attempt = event if type(event) is tuple else (None, event)  # not a NamedTuple: that is an event
        with self._lock:
            if isinstance(of_attempt, NodeBeat):
                self._queue.newest[trial, of_attempt.host] = event
            elif isinstance(of_attempt, Wait):
                self._queue.newest[trial, Wait] = event
            else:
                self._queue.events.append(event)

    def __enter__(self) -> Screen:
        write = self._draw if self._picture is not None else self._write
        self._thread = threads.start(write, name="terminal", on_error=self._stop_writing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------- in the thread
    def _take_queue(self) -> _Queue:
        self._woken.clear()
        with self._lock:
            queue, self._queue = self._queue, _Queue()
        return queue

    def _write(self) -> None:
        while True:
            self._woken.wait()
            queue = self._take_queue()
            # Read after the queue was taken: that clears the wake-up, which may have come from __exit__.
            is_over = self._is_over
            for line in queue.lines:
                print(_formatted(line, self._width), file=sys.stderr, flush=True)
            if is_over and not self._queue.lines:
                return

    def _draw(self) -> None:
        from pipeline.live import views  # late: it imports rich, which a command without a terminal doesn't need

        picture, drawn_at = self._picture, 0.0
        assert picture is not None
        with views.shown(lambda: picture.state, colours=takes_colours(sys.stderr, os.environ)) as live:
            while True:
                is_over, queue, now = self._is_over, self._take_queue(), time.monotonic()
                for event in (*queue.events, *queue.newest.values(), *(ShownLine(text=line) for line in queue.lines)):
                    picture.apply(event, now)
                if queue.lines or now - drawn_at >= _REDRAW_S:
                    picture.read_files(now)
                    drawn_at = now
                    if queue.lines:
                        views.print_above(live, [_formatted(line, live.console.width) for line in queue.lines])
                    else:
                        live.refresh()
                if is_over and not self._queue.lines:
                    return
                # wait for the next frame, but notice the end at once
                while not (is_over or self._is_over) and time.monotonic() < now + FRAME_S:
                    time.sleep(0.05)

    def _stop_writing(self, why: str) -> None:
        """Stop writing, because stderr accepts nothing more. The work continues, and its log files have all lines."""
        self._is_broken = True
        with suppress(OSError, ValueError):
            print(f"WARNING: nothing more is shown here, and the work goes on: {why}", file=sys.stderr, flush=True)


def _formatted(text: str, width: int | None) -> str:
    """Format lines for stderr, folded at ``width`` columns; None if it is no terminal."""
    colours = takes_colours(sys.stderr, os.environ)
    text = program_lines(without_host(text), terminal=width is not None, colours=colours)
    return text if width is None else folded(text, max(_LEAST_WIDTH, width))
