"""Start threads: the only module of the controller half that does. Every exception of a thread is reported."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pipeline.core.errors import text_of
from pipeline.core.processes import unexpected

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_PER_WORKER = 2  # items per worker: one in progress, one waiting


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], *, workers: int) -> Iterator[_Result]:
    """Like ``map``, with ``workers`` threads that work on a bounded number of items in advance.

    An exception of the function is raised at its result's position; items that no worker has started are then dropped.
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
    """Create a thread that will call ``target(*args)`` once started.

    Args:
        on_error: called in that thread with one line about any exception of ``target``. It must put an event, an answer
            or a message where another thread waits for one.
        daemon: the process doesn't wait for the thread when it exits.
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
            on_error(f"{described(error)}; the traceback: {unexpected.keep(error)}")
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
