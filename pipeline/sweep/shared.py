"""What the trials of a sweep share: provenance, code snapshot, hosts, and the processes that report and record.

One process creates the reports, and one per tracker records runs. Starting them per trial would cost seconds of imports
each, between a slot and its next trial.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType

from pipeline import tracking
from pipeline.cluster.hosts import Hosts
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic
from pipeline.core.processes import process
from pipeline.core.processes.signals import Stop
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import Cluster
from pipeline.evaluation import stored_report
from pipeline.execution.launch_folder import collect_provenance
from pipeline.execution.run import Run
from pipeline.execution.work import RunServices
from pipeline.keys import rank_environment
from pipeline.keys.import_closure import matches
from pipeline.runs import provenance
from pipeline.runs.folder import RunFolder
from pipeline.sweep.folder import SweepFolder
from pipeline.sweep.slots import placed
from pipeline.sweep.worker_process import Answer, WorkerProcess
from pipeline.tracking.client import DestinationRecorder, Recorder, patient
from pipeline.tracking.destinations import Destination

_REPORT_S = 300.0
_AT_ONCE = 8  # runs that are recorded late, so as not to overload a server that has just returned


class _SharedRecorder(DestinationRecorder):
    """Records one run in a destination through the sweep's process."""

    def __init__(self, run_dir: Path, to: Destination, worker: WorkerProcess) -> None:
        super().__init__(run_dir, to)
        self._worker = worker
        self._pending: Future[Answer | None] | None = None

    def start(self) -> None:
        self._pending = self._worker.ask(run_dir=str(self.run_dir))

    def finish(self) -> None:
        if self._pending is None and not self.is_recorded():
            self.start()
        if (pending := self._pending) is not None:
            patient(self._worker.pid, lambda timeout_s: bool(wait([pending], timeout_s).done))
        if self._says_nothing():
            super().finish()  # the worker has ended, so start a separate process


class Shared:
    """Creates each resource on first use, and closes all at the end of the ``with`` block. Thread-safe."""

    def __init__(self, folder: SweepFolder, slots: Sequence[Cluster], root: Path, say: Callable[[str], None]) -> None:
        self._folder, self._slots, self._root, self._say = folder, slots, root, say
        self._open = ExitStack()
        self._lock = threading.Lock()
        self._origin: tuple[provenance.Provenance, bytes] | None = None
        self._hosts: dict[int, Hosts] = {}
        self._reporting: WorkerProcess | None = None
        self._recording: dict[Destination, WorkerProcess] | None = None

    def __enter__(self) -> Shared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with waiting(self._say, "completing reports and records"):
            self._open.close()

    def placed(self, run: Run, slot: int) -> Run:
        """Return the trial's run on the hosts of its slot."""
        if not self._slots:
            return run
        return dataclasses.replace(run, config=placed(run.config, self._slots[slot]))

    def services(self, run: Run, slot: int, on_trained: Callable[[], None], stop: Stop) -> RunServices:
        """Return the services for a run on the hosts of ``slot``."""
        if run.config.script is None:  # scripts have no report
            self._reports()  # starts with the first trial, so that it is warm when that trial ends
        return RunServices(
            evaluate=self._evaluate,
            recorder=self.recorder,
            provenance=self._provenance,
            on_trained=on_trained,
            code=self._code(run),
            hosts=self._reach(slot, run.config.cluster),
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

    def _reach(self, slot: int, cluster: Cluster) -> Hosts | None:
        if not self._slots:
            return None
        with self._lock:
            if slot not in self._hosts:
                self._hosts[slot] = self._open.enter_context(closing(Hosts(cluster)))
            return self._hosts[slot]

    # --------------------------------------------------------------------------------- reports, records
    def _worker(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> WorkerProcess:
        return self._open.enter_context(closing(WorkerProcess(argv, env, self._folder.path / log)))

    def _reports(self) -> WorkerProcess:
        with self._lock:
            if self._reporting is None:
                argv = [sys.executable, "-m", stored_report.PROGRAM, "--serve"]
                self._reporting = self._worker(argv, rank_environment.of_report(os.environ, self._root), "reports.log")
            return self._reporting

    def _evaluate(self, folder: RunFolder, root: Path) -> None:
        """Create the report, in a child process if the worker has ended (out of memory). Raises PacelineError."""
        pending = self._reports().ask(run_dir=str(folder.path), made_of=stored_report.made_of_run(folder, root))
        answer = pending.result() if wait([pending], _REPORT_S).done else None
        if answer is None:
            stored_report.make(folder, root)
        elif answer.error is not None:
            raise PacelineError(f"the evaluation report of {folder.key} failed: {answer.error}")

    def recorder(self, run: Run) -> Recorder:
        """Return the recorder of one trial; it starts its own process for a destination without a shared one."""
        with self._lock:
            if self._recording is None:
                self._recording = {
                    to: self._worker(
                        tracking.serve_command(to.uri, to.experiment, tracker=to.tracker),
                        process.of_this_clone(to.env),
                        "recorder.log",
                    )
                    for to in tracking.destinations(vars(run.config.tracking), self._root)
                }
            workers = self._recording

        def make(run_dir: Path, to: Destination) -> DestinationRecorder:
            return _SharedRecorder(run_dir, to, workers[to]) if to in workers else DestinationRecorder(run_dir, to)

        return Recorder(run.folder.path, run.config, run.root, make=make)

    def record_missed(self, runs: Sequence[Run]) -> None:
        """Record runs that ended before, a few at a time. Stops at failures: the remaining runs would fail alike."""
        missed, done = [self.recorder(run) for run in runs], 0
        for at in range(0, len(missed), _AT_ONCE):
            part = missed[at : at + _AT_ONCE]
            for recorder in part:
                recorder.start()
            for recorder in part:
                recorder.finish(lambda _: None)
            failed = [recorder for recorder in part if not recorder.is_complete()]
            done += len(part) - len(failed)
            if failed:
                self._say(
                    f"WARNING: {len(missed) - done} run(s) of before are not recorded yet: "
                    f"{failed[0].why()}\n  try: the same command, once that is fixed"
                )
                break
        if done:
            self._say(f"{done} run(s) whose record was missing are recorded now")


def was_missed(run: Run) -> bool:
    """Return True if a record of an ended run was begun but not completed, according to its folder."""
    records = [to.last_recorded(run.folder.path) for to in tracking.destinations(vars(run.config.tracking), run.root)]
    return any(recorded is not None and not recorded.complete for recorded in records)
