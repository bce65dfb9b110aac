"""One command's work on one run, and the services that its caller provides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.hosts import Hosts
from pipeline.cluster.running import Progress, nothing
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.processes.signals import Stop
from pipeline.core.specs import Cluster, LaunchPlan, State, Waiting
from pipeline.execution.run import Run
from pipeline.runs import journal, provenance
from pipeline.runs.checkpoint_mirror import Mirroring
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock
from pipeline.tracking.client import Recorder

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunServices:
    """What the caller provides: a single run has its own helper processes, a sweep's trials share them.

    ``evaluate`` makes the report of a run folder with the project's code (raises PacelineError). ``on_trained`` is
    called when the hosts are free again, before outputs, report and record are complete, but not if another command
    finished the run. ``code`` lists the files to copy the snapshot from (None: the project's own). ``hosts`` and
    ``stop`` are passed to run_attempt. ``on_event`` receives an attempt's plan and events; ``on_wait`` is called every
    second with the step under way and its start, and replaces the lines about long waits. Both feed the live view and
    must not block.
    """

    evaluate: Callable[[RunFolder, Path], None]
    recorder: Callable[[Run], Recorder]
    provenance: Callable[[Run, Sequence[str], float, Say], tuple[provenance.Provenance, bytes]]
    on_trained: Callable[[], None] | None = None
    code: Mapping[str, Path] | None = None
    hosts: Hosts | None = None
    stop: Stop | None = None
    on_event: Callable[[Progress], None] = nothing
    on_wait: Callable[[Waiting], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """One command's work on one run, whose lock it holds. ``started``: unix time in seconds."""

    run: Run
    lock: RunLock
    recorder: Recorder
    argv: Sequence[str]
    say: Heartbeat
    services: RunServices
    started: float
    attached: tuple[LaunchPlan, Cluster] | None
    mirror: Mirroring | None


def note(run: Run, state: State, attempt: int, detail: str = "") -> None:
    """Append an entry to the run's journal. Raises OSError."""
    entry = journal.Entry(state=state, attempt=attempt, time=time.time(), detail=run.config.hide(detail))
    journal.append(run.folder.journal, entry)
