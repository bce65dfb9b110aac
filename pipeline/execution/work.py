"""The work of one command on one run: the record that the modules of this package pass on while they make a run, and
the services that the command provides for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.cluster.events import FollowedEvent
from pipeline.cluster.hosts import Hosts
from pipeline.core.processes.signals import Stop
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import Cluster, LaunchPlan, State, Wait
from pipeline.execution.run import Run
from pipeline.runs import journal
from pipeline.runs.checkpoints import CheckpointMirror
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock
from pipeline.runs.provenance import Provenance
from pipeline.tracking.client import Recorder

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True, kw_only=True)
class RunServices:
    """What the caller provides: a single run has its own helper processes, a sweep's trials share them.

    Attributes:
        evaluate: makes the report of a run folder with the project's code. Raises PacelineError.
        recorder: returns the recorder of a run.
        provenance: returns provenance and patch of a run, from its command line, the command's start (unix time) and a
            receiver of warnings.
        on_trained: called when the hosts are free again, before outputs, report and record are complete; not if another
            command finished the run.
        code: files to copy the code snapshot from; None: the project's own.
        hosts: open connections to the run's hosts, which a sweep lends to its trials. The sweep itself replaces silent
            hosts, so a trial neither waits for them nor takes spares. None: the run opens its own connections.
        stop: a request to end, for an attempt outside of the main thread, which gets no signals.
        on_event: receives an attempt's plan and events, for the live view; it must not block.
        on_wait: called every second with what is waited for and for how long. It replaces the lines about long waits;
            it must not block.
    """

    evaluate: Callable[[RunFolder, Path], None]
    recorder: Callable[[Run], Recorder]
    provenance: Callable[[Run, Sequence[str], float, Say], tuple[Provenance, bytes]]
    on_trained: Callable[[], None] | None = None
    code: Mapping[str, Path] | None = None
    hosts: Hosts | None = None
    stop: Stop | None = None
    on_event: Callable[[FollowedEvent], None] = lambda _: None
    on_wait: Callable[[Wait], None] | None = None


class OpenAttempt(NamedTuple):
    """An attempt that another command has started, and its hosts."""

    plan: LaunchPlan
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class Work:
    """One command's work on one run, whose lock it holds. ``started``: unix time in seconds.

    ``attached``: the attempt to follow; None: look for one, or start one. ``mirror``: copies of checkpoints, if any."""

    run: Run
    lock: RunLock
    recorder: Recorder
    argv: Sequence[str]
    say: WaitReports
    services: RunServices
    started: float
    attached: OpenAttempt | None
    mirror: CheckpointMirror | None


def add_to_journal(run: Run, state: State, attempt: int, detail: str = "") -> None:
    """Append an entry to the run's journal. Raises OSError."""
    entry = journal.Entry(state=state, attempt=attempt, time=time.time(), detail=run.config.hide(detail))
    journal.append(run.folder.journal, entry)
