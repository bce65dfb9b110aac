"""Resources shared by the trials of a sweep: provenance, code snapshot, hosts, report and record processes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType

from pipeline import tracking
from pipeline.cluster import launchers
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.core.files import write_atomic
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.processes.signals import Stop
from pipeline.core.specs import Cluster
from pipeline.execution.attempting import RunServices
from pipeline.execution.complete import collect_provenance
from pipeline.execution.run import Run
from pipeline.keys.import_closure import matches
from pipeline.runs import provenance
from pipeline.sweep.folder import SweepFolder
from pipeline.sweep.slots import placed
from pipeline.sweep.workers import RecordWorkers, ReportWorker


def was_missed(run: Run) -> bool:
    """Return True if a record of an ended run was begun but not completed, according to its folder."""
    records = [to.last_recorded(run.folder.path) for to in tracking.destinations(vars(run.config.tracking), run.root)]
    return any(recorded is not None and not recorded.complete for recorded in records)


class Shared:
    """Creates each resource on first use, and closes all at the end of the ``with`` block. Thread-safe."""

    def __init__(self, folder: SweepFolder, slots: Sequence[Cluster], root: Path, say: Callable[[str], None]) -> None:
        self._folder, self._slots, self._root, self._say = folder, slots, root, say
        self._open = ExitStack()
        self._lock = threading.Lock()
        self._origin: tuple[provenance.Provenance, bytes] | None = None
        self._hosts: dict[int, Hosts] = {}
        self._reporting: ReportWorker | None = None
        self._recording: RecordWorkers | None = None

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
            self._reports()
        return RunServices(
            # looked up when called, because a script's run never has a report worker
            evaluate=lambda folder, root: self._reports().evaluate(folder, root),
            recorder=self.records(run).recorder,
            provenance=self._provenance,
            on_trained=on_trained,
            code=self._code(run),
            hosts=self._reach(slot, run.config.cluster),
            stop=stop,
        )

    def forget(self, slot: int) -> None:
        """Drop the state of a slot's hosts after a failure; they are probed again before the next trial."""
        if slot in self._hosts:
            self._hosts[slot].forget()

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
                hosts = Hosts(cluster)
                if len(self._slots) > 1 and launchers.capabilities(cluster).hosts_are_granted:
                    first = next(iter(self._hosts.values()), hosts).launcher
                    assert isinstance(first, GrantedLauncher)
                    assert isinstance(hosts.launcher, GrantedLauncher)
                    hosts.launcher.scheduler = first.scheduler  # can submit several trials as one job
                    first.scheduler.side_by_side = len(self._slots)
                self._hosts[slot] = self._open.enter_context(closing(hosts))
            return self._hosts[slot]

    def _reports(self) -> ReportWorker:
        """Return the report process, started with the first trial so that it is warm when that trial ends."""
        with self._lock:
            if self._reporting is None:
                self._reporting = self._open.enter_context(
                    closing(ReportWorker(self._root, self._folder.path / "reports.log"))
                )
            return self._reporting

    def records(self, run: Run) -> RecordWorkers:
        """Return the processes that record the runs of the sweep."""
        with self._lock:
            if self._recording is None:
                log = self._folder.path / "recorder.log"
                self._recording = self._open.enter_context(closing(RecordWorkers(run.config, self._root, log)))
            return self._recording
