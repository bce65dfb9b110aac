"""The processes that a sweep keeps for all of its trials: one makes the reports, one records in MLflow (and one more in
each other tracker).

Each would cost seconds of imports in every trial, and would stand between a slot and its next trial.
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
from pipeline.evaluation import report_key
from pipeline.execution.complete import evaluate_in_child
from pipeline.execution.run import Run
from pipeline.keys import rank_environment
from pipeline.runs.folder import RunFolder
from pipeline.tracking.client import DestinationRecorder, Recorder, patient
from pipeline.tracking.destinations import Destination

_REPORT_S = 300.0
_AT_ONCE = 8
_END_S = 60.0  # what other commands' runs are still told of this sweep

Answer = dict[str, Any] | None


class WorkerProcess:
    """A child process that answers requests; safe to ask from several threads. The answer None: it has ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._child: subprocess.Popen[bytes] = process.companion(argv, env=env, log=log)
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Answer]] = {}
        self._lock = threading.Lock()
        self._closed = False  # nothing more is read from it
        self._reader = threads.start(self._read, name="answers of a worker", on_error=self._gone)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **request: Any) -> queue.SimpleQueue[Answer]:
        """Send a request; its answer comes into the queue."""
        answer: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            try:
                if self._closed:
                    raise BrokenPipeError
                assert self._child.stdin is not None
                self._child.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                self._child.stdin.flush()
            except OSError:
                self._waiting.pop(number, None)
                answer.put(None)
        return answer

    def close(self) -> None:
        """Let it finish what it was asked, then end it. One that was asked nothing may still import, for seconds."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
            with self._lock:
                is_idle = not self._waiting
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
                waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting.put(answer)
        self._gone()

    def _gone(self, why: str = "") -> None:
        """Nobody waits for an answer that no longer comes: each caller then does the work by itself."""
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                waiting.put(None)
            self._waiting.clear()


def _wait(answer: queue.SimpleQueue[Answer], timeout_s: float) -> Answer:
    try:
        return answer.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _came(answer: queue.SimpleQueue[Answer], timeout_s: float) -> bool:
    try:
        answer.get(timeout=timeout_s)
    except queue.Empty:
        return False
    return True


class ReportWorker:
    """Makes the report of one run folder after another."""

    def __init__(self, root: Path, log: Path) -> None:
        argv = [sys.executable, "-m", report_key.PROGRAM, "--serve"]
        self._worker = WorkerProcess(argv, rank_environment.of_report(os.environ, root), log)

    def evaluate(self, folder: RunFolder, root: Path) -> None:
        """Raises PacelineError. Without the worker (short of memory, it may have been ended): in a child."""
        pending = self._worker.ask(run_dir=str(folder.path), made_of=report_key.made_of_run(folder, root))
        answer = _wait(pending, _REPORT_S)
        if answer is None:
            evaluate_in_child(folder, root)
        elif answer.get("error") is not None:
            raise PacelineError(f"the evaluation report of {folder.key} failed: {answer['error']}")

    def close(self) -> None:
        self._worker.close()


def was_missed(run: Run) -> bool:
    """Whether a record of an ended run was begun and not completed, as its folder tells."""
    records = [to.last_recorded(run.folder.path) for to in tracking.destinations(vars(run.config.tracking), run.root)]
    return any(recorded is not None and not recorded.complete for recorded in records)


class RecordWorker:
    """Recorders for the trials, which share one process."""

    def __init__(self, config: RunConfig, root: Path, log: Path) -> None:
        self._workers: dict[Destination, WorkerProcess] = {}
        for to in tracking.destinations(vars(config.tracking), root):
            argv = tracking.serve_command(to.uri, to.experiment, tracker=to.tracker)
            self._workers[to] = WorkerProcess(argv, process.of_this_clone(to.env), log)

    def recorder(self, run: Run) -> Recorder:
        """That of one trial; a process of its own for a destination that none of the others has."""
        return Recorder(run.folder.path, run.config, run.root, make=self._destination_recorder)

    def _destination_recorder(self, run_dir: Path, to: Destination) -> DestinationRecorder:
        worker = self._workers.get(to)
        return DestinationRecorder(run_dir, to) if worker is None else _SharedRecorder(run_dir, to, worker)

    def record_missed(self, runs: Sequence[Run], say: Callable[[str], None]) -> None:
        """Record runs that ended before, a few at a time: a server that comes back shouldn't be run over."""
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
            if failed:  # the others would wait in vain as well
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
    """Records one run in a destination through the sweep's process for it."""

    def __init__(self, run_dir: Path, to: Destination, worker: WorkerProcess) -> None:
        super().__init__(run_dir, to)
        self._worker = worker
        self._answer: queue.SimpleQueue[Answer] | None = None

    def start(self) -> None:
        self._answer = self._worker.ask(run_dir=str(self.run_dir))

    def finish(self) -> None:
        if self._answer is None and not self.is_recorded():
            self.start()
        if self._answer is not None:
            patient(self._worker.pid, partial(_came, self._answer))
        if self._says_nothing():
            super().finish()  # the worker is gone: a process of its own
