"""A bound for what a tracking server answers: in time and in memory, whatever it goes on to send.

MLflow reads each answer whole, and its time limit is one for every single packet. So each call has a thread of its own,
and who waits for it looks at the clock and at this process's memory. In a call that takes too long or too much an
exception is raised (``PyThreadState_SetAsyncExc`` of Python's C API): it returns from each packet within MLflow's
limit, and urllib3 closes its connection then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pipeline.core import threads
from pipeline.tracking.failures import StoreError

GROWTH_BYTES = 256 << 20  # of this process in one call; the largest answer, a long metric's history, takes some MB
_SLOW_BYTES_PER_S = 100_000  # of a line over which files are sent
_FETCHED_BYTES = 10 << 20  # of the files that say what a run was made of
_REQUESTS = 3  # that one call makes, each answered just in time
_LOOK_S = 0.1
_THREAD = "answer"
_Result = TypeVar("_Result")


class EndlessError(Exception):
    """What is raised in the thread of a call that is given up."""


class Bounded:
    """A client of a server: each of its methods ends, with its own result or exception, or with a StoreError."""

    def __init__(self, client: object) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_call, getattr(self._client, name), _FETCHED_BYTES if name == "download_artifacts" else 0)


def _call(method: Callable[..., _Result], size_bytes: int, *words: Any, **named: Any) -> _Result:
    one_s = float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
    limit_s = _REQUESTS * one_s + sum(map(_sent_bytes, words), size_bytes) / _SLOW_BYTES_PER_S
    return within(partial(method, *words, **named), limit_s, ends_within_s=one_s + 1.0)


def within(function: Callable[[], _Result], limit_s: float, *, ends_within_s: float) -> _Result:
    """What it returns or raises, in a thread.

    Args:
        ends_within_s: so long an EndlessError may take until it is noticed there.

    Raises:
        StoreError: it took longer than ``limit_s`` or more than GROWTH_BYTES.
    """
    results: list[_Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threads.start(run, name=_THREAD, on_error=lambda text: print(text, file=sys.stderr))
    left_s, allowed_bytes = limit_s, memory_bytes() + GROWTH_BYTES
    while True:
        thread.join(_LOOK_S)
        if not thread.is_alive():
            if raised:
                raise raised[0]
            return results[0]
        left_s -= _LOOK_S  # a look that comes late says that this process had no processor: that isn't counted
        grown = memory_bytes() > allowed_bytes
        if grown or left_s <= 0:
            break
    until = time.monotonic() + ends_within_s
    while thread.is_alive() and time.monotonic() < until:  # one that comes while something is destroyed is lost
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(EndlessError))
        thread.join(_LOOK_S)
    limit = f"{GROWTH_BYTES >> 20} MiB" if grown else f"{limit_s:g} s"
    raise StoreError(f"its answer has no end: given up after {limit}")


def leave(code: int) -> NoReturn:
    """End the process. Python would wait for threads of MLflow's own that still read an answer without end."""
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def memory_bytes() -> int:
    """What this process has in memory; where the system doesn't tell (macOS), the most that it has had."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _sent_bytes(word: object) -> int:
    """Of a file or folder that is sent; anything else counts nothing."""
    path = Path(word) if isinstance(word, str) and word.startswith("/") else None
    if path is None or not path.exists():
        return 0
    return sum(item.stat().st_size for item in [path, *path.rglob("*")])
