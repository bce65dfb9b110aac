"""A child process that works for all trials of a sweep, so that its imports are paid for once."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.processes import process, threads

_END_S = 60.0  # for pending requests when the sweep ends


class Answer(NamedTuple):
    """The answer to a request; ``error`` is None if it was carried out."""

    error: str | None


class WorkerProcess:
    """A child process that answers requests from several threads: lines of JSON on its stdin and stdout.

    A request without an answer, because the process has ended, gets None.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._child: subprocess.Popen[bytes] = process.background(argv, env=env, log=log, answers=True)
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Answer | None]] = {}
        self._lock = threading.Lock()
        self._closed = False  # no more answers will come
        self._reader = threads.start(self._read, name="answers of a worker", on_error=self._gone)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **request: Any) -> Future[Answer | None]:
        """Send a request; the future gets the answer."""
        pending: Future[Answer | None] = Future()
        with self._lock:
            number = next(self._numbers)
            try:
                if self._closed:
                    raise BrokenPipeError
                assert self._child.stdin is not None
                self._child.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                self._child.stdin.flush()
                self._pending[number] = pending
            except OSError:
                pending.set_result(None)
        return pending

    def close(self) -> None:
        """Let it finish pending requests, then end it; an idle one, which may still be importing, is ended at once."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
            with self._lock:
                is_idle = not self._pending
            self._child.wait(timeout=0 if is_idle else _END_S)
        except (OSError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()
        self._reader.join(timeout=1.0)

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            with suppress(ValueError):
                raw = json.loads(line)
                number = raw.get("id") if isinstance(raw, dict) else None
                with self._lock:
                    pending = self._pending.pop(number, None) if isinstance(number, int) else None
                if pending is not None:
                    pending.set_result(Answer(error=raw.get("error")))
        self._gone()

    def _gone(self, why: str = "") -> None:
        """Answer all pending requests with None: each caller then does the work itself."""
        with self._lock:
            self._closed = True
            for pending in self._pending.values():
                pending.set_result(None)
            self._pending.clear()
