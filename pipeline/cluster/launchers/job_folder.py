"""The folder through which the controller and the nodes of a batch job talk to each other, in the shared run folder.

The controller appends orders to one file, each node appends reports to a file of its own (agent/running/job.py).
``JobFolder`` writes orders and reads reports; ``job_follower.py`` turns reports into events. Every file is made before
the job is submitted and only ever grows: over NFS a new file may stay hidden for half a minute, while appended text is
seen as soon as the file is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.requests import ExamineOrder, JobBeat, JobOrder, JobReport, JobRequest, StartRequest
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.core.files import write_atomic
from trainers.contract.beats import NodeExamination
from trainers.contract.records import Record, as_json, from_json

REQUEST = "request"
"""The file in the job's folder that every node's agent reads first."""
OUTPUT, _ORDERS = "out", "orders"
"""The files for what the job prints, and for the controller's orders."""

_TAIL_BYTES = 64 << 10  # of the job's output that are read


class JobFolder:
    """One job's folder. ``script_name``: the file with the script or manifest that the scheduler got.

    "Restart" means a restart of the job by the scheduler, which gives it new nodes; orders and reports belong to one.
    """

    def __init__(self, path: Path, script_name: str) -> None:
        self.path, self._script = path, path / script_name

    def make(self, script: str, request: JobRequest, nnodes: int) -> None:
        """Make everything that the job reads, and the empty files that will be written. Raises OSError."""
        self.path.mkdir(parents=True)
        write_atomic(self._script, script)
        write_atomic(self.path / REQUEST, message(request, new_token()))
        for name in (_ORDERS, OUTPUT, *(f"{kind}-{number}" for kind in ("node", "beats") for number in range(nnodes))):
            (self.path / name).touch()

    @property
    def script(self) -> str:
        """The script or manifest that the scheduler got; '' if the folder is gone."""
        try:
            return self._script.read_text(encoding="utf-8")
        except OSError:
            return ""

    def start(self, restart: int, start: StartRequest) -> None:
        """Let all nodes start in that restart of the job. Raises OSError: the folder was removed."""
        self._order(JobOrder(restart=restart, start=start))

    def examine(self, restart: int, order: ExamineOrder) -> None:
        """Let all nodes examine their ranks; nothing happens if the folder was removed."""
        with contextlib.suppress(OSError):
            self._order(JobOrder(restart=restart, examine=order))

    def end(self, restart: int) -> None:
        """Tell all nodes to end the ranks that they run in that restart of the job."""
        with contextlib.suppress(OSError):  # if the folder was removed, the agents end them by themselves
            self._order(JobOrder(restart=restart, end_start=True))

    def leave(self, restart: int | None = None) -> None:
        """Tell all agents to end, and so the job; with ``restart`` only those in that restart of the job."""
        with contextlib.suppress(OSError):
            self._order(JobOrder(restart=restart, leave=True))

    def _order(self, order: JobOrder) -> None:
        # not "a", which would make a removed file again
        with (self.path / _ORDERS).open("r+", encoding="utf-8") as file:
            file.seek(0, 2)
            file.write(json.dumps(as_json(order)) + "\n")

    def beat(self) -> None:
        """Tell the waiting agents that a command still intends to start something; without it they end."""
        with contextlib.suppress(OSError):
            os.utime(self.path / _ORDERS)

    def orders(self) -> list[JobOrder]:
        """Return all orders so far."""
        return self._lines(_ORDERS, JobOrder)

    def was_left(self) -> bool:
        """True if the nodes were told to leave for good."""
        return any(order.leave and order.restart is None for order in self.orders())

    def is_idle(self, restart: int, nnodes: int) -> bool:
        """True if every start of this restart of the job has ended on every node."""
        run_ids = [
            order.start.run_id for order in self.orders() if order.restart == restart and order.start is not None
        ]
        return all(self.end_of(number, run_id) for run_id in run_ids for number in range(nnodes))

    def output_bytes(self) -> int:
        """Return the length of the job's output so far."""
        try:
            return (self.path / OUTPUT).stat().st_size
        except OSError:
            return 0

    def reports(self, number: int) -> list[JobReport]:
        """Return what one node has reported so far."""
        return self._lines(f"node-{number}", JobReport)

    def _lines(self, name: str, kind: type[Record]) -> list[Record]:
        """Return the records in a file, a line each; none while it is missing or damaged."""
        try:
            # what follows the last end of line is being written
            lines = (self.path / name).read_text(encoding="utf-8").split("\n")[:-1]
            return [from_json(kind, json.loads(line)) for line in lines]
        except (OSError, ValueError):
            return []

    def facts(self, restart: int, nnodes: int) -> list[dict[str, Any]]:
        """Return the newest facts of each node that has reported in this restart of the job, by node number."""
        newest = []
        for number in range(nnodes):
            reports = [report for report in self.reports(number) if report.restart == restart]
            facts = [report.facts for report in reports if report.facts is not None]
            newest += facts[-1:]
        return newest

    def end_of(self, number: int, run_id: str) -> JobReport | None:
        """Return one node's report of how its part of a start has ended; None: it hasn't ended."""
        ends = (report for report in self.reports(number) if report.run_id == run_id and report.end is not None)
        return next(ends, None)

    def beat_of(self, number: int, run_id: str) -> JobBeat | None:
        """Return one node's newest heartbeat of its ranks in a start; None: none yet, or it is just being written."""
        try:
            beat = from_json(JobBeat, json.loads((self.path / f"beats-{number}").read_bytes()))
        except (OSError, ValueError):
            return None
        return beat if beat.run_id == run_id else None

    def examinations(self, number: int, run_id: str) -> list[NodeExamination]:
        """Return one node's examinations of its ranks in a start."""
        reports = (report for report in self.reports(number) if report.run_id == run_id)
        return [report.examination for report in reports if report.examination is not None]

    def ended_well(self, run_id: str, nnodes: int) -> bool:
        """True if all nodes have reported that a start ended well."""
        reports = [self.end_of(number, run_id) for number in range(nnodes)]
        return all(report is not None and report.end is not None and report.end.code == 0 for report in reports)

    def output(self, start_bytes: int = 0) -> list[str]:
        """Return the last lines of the job's output from ``start_bytes`` on."""
        try:
            data = (self.path / OUTPUT).read_bytes()[start_bytes:][-_TAIL_BYTES:]
        except OSError:
            return []
        return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
