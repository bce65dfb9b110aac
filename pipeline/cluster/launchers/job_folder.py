"""The folder through which the controller and the nodes of a batch job talk to each other, in the shared run folder.

The controller appends orders to one file, each node appends reports to a file of its own (agent/running/job.py).
``JobFolder`` writes orders and reads reports; ``JobFollower`` turns the reports of one attempt into events. Every file
is made before the job is submitted and only ever grows: over NFS a new file may stay hidden for half a minute, while
appended text is seen as soon as the file is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.requests import ExamineOrder, JobBeat, JobOrder, JobReport, JobRequest, StartRequest
from pipeline.cluster.agent.running.output import Tail
from pipeline.cluster.agent.wire import REMOVED
from pipeline.cluster.events import Event, NodeLost
from pipeline.cluster.launchers.base import GrantedJob, JobState
from pipeline.cluster.launchers.transport.answers import log_line, node_end, with_host_label
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.core.files import write_atomic
from pipeline.core.processes import threads
from pipeline.core.specs import LaunchPlan, NodePlan
from trainers.contract.beats import NodeExamination
from trainers.contract.records import Record, as_json, from_json

REQUEST = "request"
"""The file in the job's folder that every node's agent reads first."""
OUTPUT, _ORDERS = "out", "orders"
"""The files for what the job prints, and for the controller's orders."""

_TAIL_BYTES = 64 << 10  # of the job's output that are read
BEAT_S = 1.0
_POLL_S = 0.1
_ASK_S = 5.0  # between two polls of the scheduler; a node's own reports come sooner


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


class JobFollower:
    """Turns the reports of the nodes in one start into events.

    One thread reads the reports and calls ``emit``. Another one calls ``poll`` for the state of the job, because the
    scheduler's commands may hang.
    """

    def __init__(
        self, plan: LaunchPlan, job: GrantedJob, poll: Callable[[], JobState], emit: Callable[[Event], None]
    ) -> None:
        self._plan, self._folder, self._restart, self._poll, self._emit = plan, job.folder, job.restart, poll, emit
        self._halted = ""  # the last reported reason why the ranks stand still
        self._closing = threading.Event()
        self._tails = {node.node_rank: Tail(f"{node.state_dir}/log") for node in plan.nodes}
        self._beat_times: dict[int, float] = {}  # node rank → the node's time of the newest beat
        # node rank → examinations that were emitted, or are older than this command
        self._examined = {
            node.node_rank: len(self._folder.examinations(node.node_rank, plan.run_id)) for node in plan.nodes
        }
        self._states = (JobState(), JobState())  # the two newest answers of the scheduler, the older one first
        threads.start(self._follow, name="follow the job", on_error=self._failed)
        threads.start(self._poll_scheduler, name="ask the scheduler", on_error=self._failed)

    def stop(self) -> None:
        """Tell every node to end its ranks."""
        self._folder.end(self._restart)

    def prune(self) -> None:
        """Do nothing: rank 0 sees the request in the shared run folder."""

    def examine(self, order: ExamineOrder) -> None:
        """Let all nodes examine their ranks; NodeExamination events follow."""
        self._folder.examine(self._restart, order)

    def close(self) -> None:
        """Emit no more events."""
        self._closing.set()

    def _follow(self) -> None:
        alive, last_beat = {node.node_rank: node for node in self._plan.nodes}, time.monotonic()
        while alive and not self._closing.wait(_POLL_S):
            states = self._states  # taken before the nodes' reports are read, so that these count first
            for node in list(alive.values()):
                if self._read_node(node):
                    del alive[node.node_rank]
            # renew the leases, without which the nodes would end their ranks, and read heartbeats
            now = time.monotonic()
            if now - last_beat >= BEAT_S:
                last_beat = now
                for node in alive.values():
                    with contextlib.suppress(OSError):
                        os.utime(f"{node.state_dir}/lease")
                    self._read_beat(node)
            # say once that the job was suspended
            if not states[1].is_unanswered and states[1].why_halted != self._halted:
                self._halted = states[1].why_halted
                if self._halted:
                    self._emit(log_line(self._plan.nodes[0].host, f"- | paceline: WARNING: {self._halted}"))
            # Twice: the nodes may have written their last reports just before the scheduler took them away.
            if all(state.why_gone for state in states):
                for node in alive.values():
                    self._emit(NodeLost(host=node.host, reason=states[1].why_gone))
                break
        self._closing.set()

    def _poll_scheduler(self) -> None:
        while not self._closing.wait(_ASK_S):
            self._states = (self._states[1], self._poll())

    def _read_node(self, node: NodePlan) -> bool:
        """Emit what a node has written since the last read. Returns True if its part has ended."""
        # before the log is read: when the end was reported, the log is complete
        report = self._folder.end_of(node.node_rank, self._plan.run_id)
        while lines := self._tails[node.node_rank].lines(last=report is not None):
            for text in lines:
                self._emit(log_line(node.host, text))
        if report is not None and report.end is not None:
            self._emit(node_end(node.host, report.end, time.time() - report.now))
        elif not Path(node.state_dir).is_dir():  # somebody has removed the run folder
            self._emit(NodeLost(host=node.host, reason=REMOVED % node.run_dir, is_explained=True))
            return True
        return report is not None

    def _read_beat(self, node: NodePlan) -> None:
        """Emit a node's newest heartbeat and examinations that weren't emitted yet."""
        beat = self._folder.beat_of(node.node_rank, self._plan.run_id)
        if beat is not None and beat.unix_time != self._beat_times.get(node.node_rank):
            self._beat_times[node.node_rank] = beat.unix_time
            self._emit(beat.beat._replace(host=node.host))
        examinations = self._folder.examinations(node.node_rank, self._plan.run_id)
        for examination in examinations[self._examined[node.node_rank] :]:
            self._emit(with_host_label(node.host, examination))
        self._examined[node.node_rank] = len(examinations)

    def _failed(self, why: str) -> None:
        for node in self._plan.nodes:
            self._emit(NodeLost(host=node.host, reason=f"can no longer be followed from here: {why}"))
