"""The one place where the controller's threads start: whatever one of them raises is told, none ends without a word."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.core.errors import text_of
from pipeline.core.processes import unexpected

if TYPE_CHECKING:
    from concurrent.futures import Future

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_PER_WORKER = 2  # items for each worker: one under way, one that waits


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], *, workers: int) -> Iterator[_Result]:
    """``map``, with the function called by ``workers`` threads for a bounded number of items ahead. What it raises is
    raised here, in the place of its result; items that nobody has begun with are dropped then."""
    from concurrent.futures import ThreadPoolExecutor  # each `doit train` loads this module

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
    """A thread that will call ``target(*args)`` once it is started.

    Args:
        on_error: called in that thread with one line about what ``target`` raised, of any class. It has to put an
            event, an answer or a message where somebody waits for one.
        daemon: the process doesn't wait for the thread at its end.
    """
    return threading.Thread(target=_run, args=(target, args, on_error), name=name, daemon=daemon)


def start(
    target: Callable[..., None], *args: object, name: str, on_error: Callable[[str], None], daemon: bool = True
) -> threading.Thread:
    """The same, started."""
    thread = new(target, *args, name=name, on_error=on_error, daemon=daemon)
    thread.start()
    return thread


def after(delay_s: float, target: Callable[[], None], *, name: str) -> threading.Timer:
    """Call ``target`` in ``delay_s`` seconds unless the timer is cancelled; what it raises goes to stderr."""
    timer = threading.Timer(delay_s, _run, args=(target, (), lambda text: print(text, file=sys.stderr)))
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def _run(target: Callable[..., None], args: tuple[object, ...], on_error: Callable[[str], None]) -> None:
    try:
        target(*args)
    except BaseException as error:
        try:
            on_error(f"{described(error)}; the traceback: {unexpected.keep(error)}")
        except BaseException:  # the last resort: both of them
            traceback.print_exc()


def described(error: BaseException) -> str:
    """``ValueError: invalid literal (streams.py:123)``: an error that was not foreseen, on one line with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    return named(error) + (f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "")


def named(error: BaseException) -> str:
    """``ValueError: invalid literal``, on one line."""
    text = text_of(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"
