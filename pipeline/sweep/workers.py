"""Processes that serve all trials of a sweep: one creates the reports, and one per tracker records runs.

Starting them per trial would cost seconds of imports each, between a slot and its next trial.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.config.build import RunConfig
from pipeline.core.errors import PacelineError
from pipeline.core.processes import process, threads
from pipeline.evaluation import stored_report
from pipeline.execution.complete import evaluate_in_child
from pipeline.execution.run import Run
from pipeline.keys import rank_environment
from pipeline.runs.folder import RunFolder
from pipeline.tracking.client import DestinationRecorder, Recorder, patient
from pipeline.tracking.destinations import Destination

_REPORT_S = 300.0
_AT_ONCE = 8
_END_S = 60.0  # for pending requests when the sweep ends

Answer = dict[str, Any] | None
Pending = queue.SimpleQueue[Answer]
"""Where the answer to a request will arrive."""


class WorkerProcess:
    """A child process that answers requests from several threads. The answer None means that it has ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._child: subprocess.Popen[bytes] = process.companion(argv, env=env, log=log)
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._closed = False  # no more answers will come
        self._reader = threads.start(self._read, name="answers of a worker", on_error=self._gone)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **request: Any) -> Pending:
        """Send a request; the answer is put into the returned queue."""
        pending: Pending = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = pending
            try:
                if self._closed:
                    raise BrokenPipeError
                assert self._child.stdin is not None
                self._child.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                self._child.stdin.flush()
            except OSError:
                self._pending.pop(number, None)
                pending.put(None)
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
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            number = answer.get("id") if isinstance(answer, dict) else None
            if not isinstance(number, int):
                continue
            with self._lock:
                pending = self._pending.pop(number, None)
            if pending is not None:
                pending.put(answer)
        self._gone()

    def _gone(self, why: str = "") -> None:
        """Answer all pending requests with None: each caller then does the work itself."""
        with self._lock:
            self._closed = True
            for pending in self._pending.values():
                pending.put(None)
            self._pending.clear()


def _wait(pending: Pending, timeout_s: float) -> Answer:
    """Return the answer; None if it doesn't arrive in time."""
    try:
        return pending.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _has_arrived(pending: Pending, timeout_s: float) -> bool:
    """Return True once the request is answered or the worker has ended, False if neither happens in time.

    Takes the answer out of the queue.
    """
    try:
        pending.get(timeout=timeout_s)
    except queue.Empty:
        return False
    return True


class ReportWorker:
    """Creates the reports of run folders, one after the other."""

    def __init__(self, root: Path, log: Path) -> None:
        argv = [sys.executable, "-m", stored_report.PROGRAM, "--serve"]
        self._worker = WorkerProcess(argv, rank_environment.of_report(os.environ, root), log)

    def evaluate(self, folder: RunFolder, root: Path) -> None:
        """Create the report, in a child process if the worker has ended (out of memory). Raises PacelineError."""
        pending = self._worker.ask(run_dir=str(folder.path), made_of=stored_report.made_of_run(folder, root))
        answer = _wait(pending, _REPORT_S)
        if answer is None:
            evaluate_in_child(folder, root)
        elif answer.get("error") is not None:
            raise PacelineError(f"the evaluation report of {folder.key} failed: {answer['error']}")

    def close(self) -> None:
        self._worker.close()


class RecordWorkers:
    """One process per destination, and the recorders of trials that share them."""

    def __init__(self, config: RunConfig, root: Path, log: Path) -> None:
        self._workers: dict[Destination, WorkerProcess] = {}
        for to in tracking.destinations(vars(config.tracking), root):
            argv = tracking.serve_command(to.uri, to.experiment, tracker=to.tracker)
            self._workers[to] = WorkerProcess(argv, process.of_this_clone(to.env), log)

    def recorder(self, run: Run) -> Recorder:
        """Return the recorder of one trial; it starts its own process for a destination without a shared one."""
        return Recorder(run.folder.path, run.config, run.root, make=self._destination_recorder)

    def _destination_recorder(self, run_dir: Path, to: Destination) -> DestinationRecorder:
        worker = self._workers.get(to)
        return DestinationRecorder(run_dir, to) if worker is None else _SharedRecorder(run_dir, to, worker)

    def record_missed(self, runs: Sequence[Run], say: Callable[[str], None]) -> None:
        """Record runs that ended before, a few at a time so as not to overload a server that has just returned."""
        missed = [self.recorder(run) for run in runs]
        done = 0
        for at in range(0, len(missed), _AT_ONCE):
            part = missed[at : at + _AT_ONCE]
            for recorder in part:
                recorder.start()
            for recorder in part:
                recorder.finish(lambda _: None)
            failed = [recorder for recorder in part if not recorder.is_complete()]
            done += len(part) - len(failed)
            if failed:  # the remaining runs would fail the same way
                first = failed[0]
                say(
                    f"WARNING: {len(missed) - done} run(s) of before are not recorded yet: "
                    f"{first.why()}\n  try: the same command, once that is fixed"
                )
                break
        if done:
            say(f"{done} run(s) whose record was missing are recorded now")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class _SharedRecorder(DestinationRecorder):
    """Records one run in a destination through the sweep's process."""

    def __init__(self, run_dir: Path, to: Destination, worker: WorkerProcess) -> None:
        super().__init__(run_dir, to)
        self._worker = worker
        self._pending: Pending | None = None

    def start(self) -> None:
        self._pending = self._worker.ask(run_dir=str(self.run_dir))

    def finish(self) -> None:
        if self._pending is None and not self.is_recorded():
            self.start()
        if self._pending is not None:
            patient(self._worker.pid, partial(_has_arrived, self._pending))
        if self._says_nothing():
            super().finish()  # the worker has ended, so start a separate process
