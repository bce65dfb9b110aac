"""What the trials of a sweep share: provenance, code snapshot, facts of hosts, and two worker processes.

One worker makes the evaluation reports, one records. Their imports take seconds, so they aren't started per trial.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.cluster.hosts import Hosts
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import Stop
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import Cluster
from pipeline.execution import stored_report
from pipeline.execution.launch_folder import collect_provenance
from pipeline.execution.run import Run
from pipeline.execution.work import RunServices
from pipeline.keys import rank_environment
from pipeline.keys.import_closure import matches
from pipeline.runs import provenance
from pipeline.runs.folder import RunFolder
from pipeline.sweep.expand import placed
from pipeline.sweep.folder import SweepFolder
from pipeline.tracking.client import PATIENCE_S, DestinationRecorder, Recorder
from pipeline.tracking.destinations import DONE, Destination, load

_END_S = 60.0  # for pending requests when the sweep ends

Answer = str | None
"""The error of a request, '' if it was carried out; None: the process has ended."""


class WorkerProcess:
    """A child process that answers requests from several threads: lines of JSON on its stdin and stdout."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._child: subprocess.Popen[bytes] = process.background(argv, env=env, log=log, answers=True)
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._closed = False  # no more answers will come
        self._reader = threads.start(self._read, name="answers of a worker", on_error=self._end_requests)

    def ask(self, **request: Any) -> Future[Answer]:
        """Send a request; the future gets the answer."""
        pending: Future[Answer] = Future()
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
        """End the process: at once if it is idle (it may still be importing), else after the pending requests."""
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
                    pending.set_result(raw.get("error") or "")
        self._end_requests()

    def _end_requests(self, _error: str = "") -> None:
        """Answer all pending requests with None; each caller then does the work itself."""
        with self._lock:
            self._closed = True
            for pending in self._pending.values():
                pending.set_result(None)
            self._pending.clear()


# ---------------------------------------------------------------------------- a process for all trials
_REPORT_S = 300.0


class _SharedRecorder(DestinationRecorder):
    """Records a trial by the worker of its destination; by a process of its own if the worker has ended."""

    def __init__(self, run_dir: Path, to: Destination, worker: WorkerProcess) -> None:
        super().__init__(run_dir, to)
        self._worker = worker
        self._pending: Future[Answer] | None = None

    def start(self) -> None:
        self._pending = self._worker.ask(run_dir=str(self.run_dir))

    def finish(self) -> None:
        if self._pending is None and not self.is_recorded():
            self.start()
        if (pending := self._pending) is not None:
            wait([pending], PATIENCE_S)
        if self._left_no_reason():
            super().finish()  # the worker has ended, so start a separate process


class Shared:
    """The shared resources of a sweep, each created on first use. Thread-safe. Close it after use."""

    def __init__(self, folder: SweepFolder, slots: Sequence[Cluster], root: Path, say: Callable[[str], None]) -> None:
        self._folder, self._slots, self._root, self._say = folder, slots, root, say
        self._open = ExitStack()
        self._lock = threading.Lock()
        self._origin: tuple[provenance.Provenance, bytes] | None = None
        self._hosts: dict[int, Hosts] = {}
        self._reporting: WorkerProcess | None = None
        self._recording: dict[Destination, WorkerProcess] | None = None

    def close(self) -> None:
        with waiting(self._say, "completing reports and records"):
            self._open.close()

    def placed(self, run: Run, slot: int) -> Run:
        """Return the trial's run on the hosts of its slot."""
        if not self._slots:
            return run
        return dataclasses.replace(run, config=placed(run.config, self._slots[slot]))

    def services(self, run: Run, slot: int, on_trained: Callable[[], None], stop: Stop) -> RunServices:
        """Return the services for a run on the hosts of ``slot``."""
        # started with the first trial, so that it has imported everything when this trial ends; scripts have no report
        if run.config.script is None:
            self._report_worker()
        with self._lock:
            if self._slots and slot not in self._hosts:
                self._hosts[slot] = self._open.enter_context(closing(Hosts(run.config.cluster)))
        return RunServices(
            evaluate=self._evaluate,
            recorder=self.recorder,
            provenance=self._provenance,
            on_trained=on_trained,
            code=self._code(run),
            hosts=self._hosts.get(slot),
            stop=stop,
        )

    def forget(self, slot: int) -> None:
        """Drop the state of a slot's hosts after a failure; they are probed again before the next trial."""
        if slot in self._hosts:
            self._hosts[slot].forget_facts()

    def _provenance(
        self, run: Run, argv: Sequence[str], now: float, say: Callable[[str], None]
    ) -> tuple[provenance.Provenance, bytes]:
        """Collect provenance once: all trials run the sweep's own snapshot of the code."""
        with self._lock:
            if self._origin is None:
                self._origin = collect_provenance(run, argv, now, say)
        origin, patch = self._origin
        return dataclasses.replace(origin, **run.details(now)), patch

    def _code(self, run: Run) -> dict[str, Path]:
        """Return the sweep's own copy of the node half, so that an edit during the sweep doesn't affect its trials."""
        with self._lock:
            for name, digest in run.key.parts["code"].items():
                copy = self._folder.code / name
                if not copy.is_file() or not matches(run.root, self._folder.code, {name: digest}):
                    write_atomic(copy, run.code.sources[name].read_bytes())
        return {name: self._folder.code / name for name in run.code.sources}

    # --------------------------------------------------------------------------------- reports, records
    def _worker(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> WorkerProcess:
        return self._open.enter_context(closing(WorkerProcess(argv, env, self._folder.path / log)))

    def _report_worker(self) -> WorkerProcess:
        with self._lock:
            if self._reporting is None:
                argv = [sys.executable, "-m", stored_report.PROGRAM, "--serve"]
                self._reporting = self._worker(
                    argv, rank_environment.for_evaluation(os.environ, self._root), "reports.log"
                )
            return self._reporting

    def _evaluate(self, folder: RunFolder, root: Path) -> None:
        """Create the report, in a child process if the worker has ended (out of memory). Raises PacelineError."""
        pending = self._report_worker().ask(run_dir=str(folder.path), made_of=stored_report.made_of(folder, root))
        answer = pending.result() if wait([pending], _REPORT_S).done else None
        if answer is None:  # the worker has ended, or hangs
            stored_report.make(folder, root)
        elif answer:
            raise PacelineError(f"the evaluation report of {folder.key} failed: {answer}")

    def recorder(self, run: Run) -> Recorder:
        """Return the recorder of one trial, which uses the shared worker of each destination."""
        with self._lock:
            if self._recording is None:
                self._recording = {
                    to: self._worker(
                        tracking.serve_command(to.uri, to.experiment, tracker=to.tracker),
                        process.child_environment(to.env),
                        "recorder.log",
                    )
                    for to in tracking.destinations(vars(run.config.tracking), self._root)
                }
            workers = self._recording

        # the destinations are the first trial's: a further one of another trial gets a process of its own
        def make(run_dir: Path, to: Destination) -> DestinationRecorder:
            return _SharedRecorder(run_dir, to, workers[to]) if to in workers else DestinationRecorder(run_dir, to)

        return Recorder(run.folder.path, run.config, run.root, make=make)

    def record_missing(self, runs: Sequence[Run]) -> None:
        """Record runs that ended before this command. Stop at a failure: the remaining runs would fail alike."""
        for done, run in enumerate(runs):
            recorder = self.recorder(run)
            recorder.start()
            recorder.finish(lambda _: None)
            if not recorder.is_complete():
                self._say(
                    f"WARNING: {len(runs) - done} run(s) of before are not recorded yet: "
                    f"{recorder.why()}\n  try: the same command, once that is fixed"
                )
                return
        self._say(f"{len(runs)} run(s) whose record was missing are recorded now")


def has_incomplete_record(run: Run) -> bool:
    """Return True if a record of an ended run was begun but not completed, according to its folder."""
    records = [load(run.folder.path, to.tracker) for to in tracking.destinations(vars(run.config.tracking), run.root)]
    return any(recorded is not None and recorded.state != DONE for recorded in records)
