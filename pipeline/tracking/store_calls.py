"""Calls to a tracking server with limits of time and memory, and plain messages for known failures.

MLflow itself limits only the time between two packets, and reads an answer of any size. Here a call runs in a thread.
Beyond a limit an exception is raised there (``PyThreadState_SetAsyncExc``), and urllib3 closes the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pipeline.core.processes import threads

ANSWER_TIMEOUT_S = 4
GROWTH_BYTES = 256 << 20  # of this process's memory in one call; a long metric's history takes some MB
_SLOW_BYTES_PER_S = 100_000  # assumed minimum upload speed
_FETCHED_BYTES = 10 << 20  # assumed size of a run's recipe files
_REQUESTS = 3  # that a call may make, each with the full time limit
_LOOK_S = 0.1
_THREAD, _IDLE = "answer", "no answer awaited"  # names of the thread during and between calls
_Result = TypeVar("_Result")
_TOO_MANY = re.compile(r"too many (\d{3}) error responses")
_WRAPPED = ("(Caused by ", "('Connection aborted.'")  # requests around urllib3 around http.client
_INNERMOST = re.compile(r"\((?:-?\d+, )?'([^']+?)(?: \(_ssl\.c:\d+\))?'\)+$")


class StoreError(Exception):
    """A call to the store failed. ``rejected``: it refused the data as invalid. ``final``: a retry would fail too."""

    def __init__(self, reason: str, *, rejected: bool = False, final: bool = False) -> None:
        self.rejected = rejected
        self.final = final
        super().__init__(reason)


def plain_reason(text: str) -> str:
    """Return the core of a failed request's message, without the nested exception classes."""
    many = _TOO_MANY.search(text)
    if many:
        return f"it answers {many[1]} ({HTTPStatus(int(many[1])).phrase})"
    if "database is locked" in text or "database table is locked" in text:
        return "another program holds its database locked (sqlite lets one write at a time): end that one, or wait"
    inner = _INNERMOST.search(text) if any(mark in text for mark in _WRAPPED) else None
    if inner and "BadStatusLine(" in text:
        return f"it speaks no HTTP: {inner[1].strip()}"
    return inner[1] if inner else text


_FIXES = (
    (
        "Invalid Host header",
        "the server doesn't answer to the name that tracking.uri has for it (Invalid Host header): start it with "
        "that name: mlflow server --allowed-hosts NAME,NAME:*",
    ),
    (
        r"(?s)^(?=.*/mlflow-artifacts/).*(?:too many 50\d error responses|\b50\d Server Error)",
        "the server could not keep a file: its folder of artifacts may be full or read-only, its log says which",
    ),
    (
        r"error code 401\b|\b401 Client Error",
        "the server refuses the login: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (in ASCII: MLflow "
        "sends other characters wrongly with files), or MLFLOW_TRACKING_TOKEN, to what it knows",
    ),
    (
        "mlflow-artifacts URI was supplied",
        "the files of this experiment are kept by a tracking server: set tracking.uri to its address, or "
        "tracking.experiment to another one",
    ),
    (
        r"'C': '28\w+', 'M': ['\"]([^'\"]+(?:\"[^\"]*\")?)",  # class 28 of PostgreSQL's error codes
        "its database refuses the login ({0}): is PGPASSWORD set, or does ~/.pgpass (mode 600) have a line?",
    ),
    (
        r"out-of-date database schema \(found version (\w+), but expected (\w+)\)",
        "its database is of another MLflow (schema {0}, this one has {1}): make a copy of it, then mlflow db upgrade "
        "ADDRESS, with the address as tracking.uri has it",
    ),
    (
        "file is not a database|database disk image is malformed",
        "its database is damaged: move the file away (a new one is made) or bring a copy of it back",
    ),
    (
        "unable to open database file",
        "its database can't be opened: a file is meant, and one that this account may write to",
    ),
    ("Can't locate revision", "its database is of a newer MLflow than this one: install that one"),
    ("No module named '?boto3", "boto3 is missing: pip install 'paceline[s3]'"),
    ("No module named '?(?:pg8000|psycopg2?|pymysql)", "pg8000 is missing: pip install 'paceline[server]'"),
)
"""Pairs of a pattern of a failure's message, and a message with the fix; {0} stands for the pattern's first group."""


def explained(text: str) -> str | None:
    """Return the message with the fix of a known failure; None if ``text`` suffices or the failure may be temporary."""
    for pattern, fix in _FIXES:
        if match := re.search(pattern, text):
            return fix.format(*match.groups())
    return None


class GivenUpError(Exception):
    """Raised in the thread of a call that exceeds a limit."""


def answer_timeout_s() -> float:
    """Return the seconds after which a request counts as unanswered."""
    return float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", ANSWER_TIMEOUT_S))


class Bounded:
    """Wraps a client of a server, so that each method ends: with its result, its exception, or a StoreError."""

    def __init__(self, client: object) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_call, getattr(self._client, name), _FETCHED_BYTES if name == "download_artifacts" else 0)


def _call(method: Callable[..., _Result], size_bytes: int, *args: Any, **kwargs: Any) -> _Result:
    """Call a client's method. ``size_bytes``: what it may have to download."""
    request_limit_s = answer_timeout_s()
    # an absolute path among the arguments is a file or folder to upload, which gets time by its size
    uploaded = [Path(arg) for arg in args if isinstance(arg, str) and arg.startswith("/")]
    size_bytes += sum(file.stat().st_size for path in uploaded if path.exists() for file in [path, *path.rglob("*")])
    limit_s = _REQUESTS * request_limit_s + size_bytes / _SLOW_BYTES_PER_S
    caller = Caller()
    try:
        return caller.call(partial(method, *args, **kwargs), limit_s, ends_within_s=request_limit_s + 1.0)
    finally:
        caller.close()


class Caller:
    """Makes calls with limits, all in one thread: a connection of sqlite3 works only in the thread that opened it."""

    def __init__(self, growth_bytes: int | None = None) -> None:
        self._growth_bytes = growth_bytes or GROWTH_BYTES  # how much this process's memory may grow in a call
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threads.start(self._run, name=_IDLE, on_error=lambda text: print(text, file=sys.stderr))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            threading.current_thread().name = _THREAD
            call()
            threading.current_thread().name = _IDLE

    def call(self, function: Callable[[], _Result], limit_s: float, *, ends_within_s: float) -> _Result:
        """Return or raise what the function returns or raises in the thread.

        Raises StoreError: the call exceeded ``limit_s`` or the limit of memory. No further calls are possible then; the
        thread is given ``ends_within_s`` to end.
        """
        results: list[_Result] = []
        raised: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                raised.append(error)
            finally:
                done.set()

        remaining_s, allowed_bytes = limit_s, memory_bytes() + self._growth_bytes
        self._calls.put(run)
        while not done.wait(_LOOK_S):
            remaining_s -= _LOOK_S  # counts iterations, not wall time: a process without CPU time must not time out
            is_too_large = memory_bytes() > allowed_bytes
            if is_too_large or remaining_s <= 0:
                self._give_up(ends_within_s)
                limit = f"{self._growth_bytes >> 20} MiB" if is_too_large else f"{limit_s:g} s"
                raise StoreError(f"its answer has no end: given up after {limit}")
        if raised:
            raise raised[0]
        return results[0]

    def _give_up(self, ends_within_s: float) -> None:
        self._calls.put(None)
        until = time.monotonic() + ends_within_s
        # repeated, because an exception that arrives while an object is being destroyed is lost
        while self._thread.is_alive() and time.monotonic() < until:
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(GivenUpError))
            self._thread.join(_LOOK_S)

    def close(self) -> None:
        """End the thread, unless it hangs in a call."""
        self._calls.put(None)
        self._thread.join(_LOOK_S)


def exit_process(code: int) -> NoReturn:
    """Exit the process, without waiting for threads that still read an endless answer."""
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def memory_bytes() -> int:
    """Return this process's resident memory; on macOS, which has no /proc, its maximum so far."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
