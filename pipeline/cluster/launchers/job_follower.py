"""The follower of one start in a batch job: it turns what the nodes report in the job's folder into events."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.cluster.agent.requests import ExamineOrder
from pipeline.cluster.agent.running.output import Tail
from pipeline.cluster.agent.wire import REMOVED
from pipeline.cluster.events import Event, NodeLost
from pipeline.cluster.launchers.base import GrantedJob, JobState
from pipeline.cluster.launchers.transport.answers import log_line, node_end, with_host_label
from pipeline.core.processes import threads
from pipeline.core.specs import LaunchPlan, NodePlan

BEAT_S = 1.0
_POLL_S = 0.1
_ASK_S = 5.0  # between two polls of the scheduler; a node's own reports come sooner


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
