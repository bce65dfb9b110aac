"""The folder that a batch job shares with the controller: orders to its nodes, and their reports.

Every file in it is made before the job is submitted and only ever grows: over NFS a new file may stay hidden for half a
minute, while appended text shows when a file is opened. pipeline/cluster/agent/running/job.py is the other side.

The scheduler is polled in a thread of its own, because a hanging one would delay the lease's beats and the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.log_lines import Tail
from pipeline.cluster.agent.wire import REMOVED
from pipeline.cluster.events import Event, NodeLost
from pipeline.cluster.launchers.transport.answers import log_line, node_beat, node_end, node_look
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.core.errors import HostError
from pipeline.core.files import write_atomic
from pipeline.core.processes import threads
from pipeline.core.specs import LaunchPlan, NodePlan

REQUEST = "request"
"""The file in the job's folder that every node's agent reads first."""
OUTPUT, _ORDERS = "out", "orders"

_TAIL_BYTES = 64 << 10


class JobFolder:
    """One job's folder.

    Args:
        script_name: the file with what the scheduler got.
    """

    def __init__(self, path: Path, script_name: str) -> None:
        self.path, self._script = path, path / script_name

    def make(self, script: str, request: dict[str, Any], nnodes: int) -> None:
        """Make everything that the job reads, and the empty files that will be written. Raises OSError."""
        self.path.mkdir(parents=True)
        write_atomic(self._script, script)
        write_atomic(self.path / REQUEST, message(request, new_token()))
        for name in (_ORDERS, OUTPUT, *(f"{of}-{number}" for of in ("node", "beats") for number in range(nnodes))):
            (self.path / name).touch()

    def removed(self, job: str) -> HostError | None:
        """Return the error of a job whose folder was removed while it waited; None: the folder exists."""
        if self.path.is_dir():
            return None
        return HostError(f"{job} found its folder {self.path} removed", hint="the same command begins anew")

    @property
    def script(self) -> str:
        """What the scheduler got; '' where the folder is gone."""
        try:
            return self._script.read_text(encoding="utf-8")
        except OSError:
            return ""

    def order(self, **order: Any) -> None:
        """Tell all nodes: ``restart`` and ``start`` or ``end``, or ``leave``. Raises OSError."""
        with (self.path / _ORDERS).open("r+", encoding="utf-8") as file:  # not made again if it was removed
            file.seek(0, 2)
            file.write(json.dumps(order) + "\n")

    def tell(self, **order: Any) -> None:
        """Like ``order``, unless the folder was removed, which ends everything too."""
        with contextlib.suppress(OSError):
            self.order(**order)

    def end(self, restart: int) -> None:
        """Tell all nodes to end what they run in that restart of the job."""
        self.tell(restart=restart, end=True)

    def beat(self) -> None:
        """Tell nodes that wait for a start that a command still intends to give one."""
        with contextlib.suppress(OSError):
            os.utime(self.path / _ORDERS)

    def leave(self, restart: int | None = None) -> None:
        """Tell all nodes to end what they do and let the job end; with ``restart`` only in that restart of the job."""
        self.tell(**({} if restart is None else {"restart": restart}), leave=True)

    def orders(self) -> list[dict[str, Any]]:
        """Return all orders so far."""
        return self._lines(_ORDERS)

    def was_left(self) -> bool:
        """True if the nodes were told to leave for good."""
        return any("leave" in order and "restart" not in order for order in self.orders())

    def is_idle(self, restart: int, nnodes: int) -> bool:
        """True if every start of this restart of the job has ended on every node."""
        started = [
            order["start"]["run_id"] for order in self.orders() if order.get("restart") == restart and "start" in order
        ]
        return all(self.end_of(number, run_id) for run_id in started for number in range(nnodes))

    def output_bytes(self) -> int:
        """Return the length of the job's output so far."""
        try:
            return (self.path / OUTPUT).stat().st_size
        except OSError:
            return 0

    def reports(self, number: int) -> list[dict[str, Any]]:
        """Return the lines that one node has reported so far."""
        return self._lines(f"node-{number}")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text(encoding="utf-8").split("\n")[:-1]
            return [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return []

    def facts(self, restart: int, nnodes: int) -> list[dict[str, Any]]:
        """Return the facts that nodes have reported in this restart of the job, in the order of their numbers."""
        rows = [self.reports(number) for number in range(nnodes)]
        facts_of_nodes = [
            [row["facts"] for row in reports if "facts" in row and row["restart"] == restart] for reports in rows
        ]
        return [facts[-1] for facts in facts_of_nodes if facts]

    def end_of(self, number: int, run_id: str) -> dict[str, Any] | None:
        """Return how one node's part of a start has ended, with the node's time; None: not yet."""
        return next((row for row in self.reports(number) if row.get("run_id") == run_id and "exit" in row), None)

    def beats(self, number: int, run_id: str) -> dict[str, Any] | None:
        """Return one node's newest report on its ranks in a start; None: none yet, or it is just being written."""
        try:
            value = json.loads((self.path / f"beats-{number}").read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) and value.get("run_id") == run_id else None

    def looks(self, number: int, run_id: str) -> list[dict[str, Any]]:
        """Return one node's answers to ``look`` in a start."""
        return [row["look"] for row in self.reports(number) if row.get("run_id") == run_id and "look" in row]

    def ended_well(self, run_id: str, nnodes: int) -> bool:
        """True if all nodes have reported that a start ended well."""
        ends = [self.end_of(number, run_id) for number in range(nnodes)]
        return all(end is not None and end["exit"]["code"] == 0 for end in ends)

    def output(self, start_bytes: int = 0) -> list[str]:
        """Return the last lines of the job's output from ``start_bytes`` on."""
        try:
            data = (self.path / OUTPUT).read_bytes()[start_bytes:][-_TAIL_BYTES:]
        except OSError:
            return []
        return [line for line in data.decode(errors="replace").splitlines() if line.strip()]


BEAT_S = 1.0
_POLL_S = 0.1
_ASK_S = 5.0  # between two polls of the scheduler; a node's own reports come sooner


class JobFollower:
    """Follows every node of one start, in one thread for all nodes and one that polls the scheduler.

    Args:
        restart: the restart of the job in which the start was made; 0: its first run.
        why_gone: returns why the job runs no more; '' while it does, or while the scheduler doesn't answer.
        emit: called from the first thread.
        why_halted: returns why the ranks stand still; '': they don't.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: JobFolder,
        restart: int,
        why_gone: Callable[[], str],
        emit: Callable[[Event], None],
        why_halted: Callable[[], str] = lambda: "",
    ) -> None:
        self._plan, self._folder, self._restart, self._why_gone, self._emit = plan, folder, restart, why_gone, emit
        self._why_halted, self._reported = why_halted, ""
        self._closing = threading.Event()
        self._tails = {node.node_rank: Tail(f"{node.state_dir}/log") for node in plan.nodes}
        self._beats: dict[int, float] = {}  # node rank → the node's time of the newest one
        self._looks = {node.node_rank: len(folder.looks(node.node_rank, plan.run_id)) for node in plan.nodes}
        self._whys = ("", "")  # the two newest answers of ``why_gone``
        threads.start(self._follow, name="follow the job", on_error=self._failed)
        threads.start(self._ask, name="ask the scheduler", on_error=self._failed)

    def stop(self) -> None:
        """Ask every node to end its part."""
        self._folder.end(self._restart)

    def prune(self) -> None:
        """Do nothing: rank 0 sees the request in the shared run folder."""

    def look(self, peers: Sequence[tuple[str, int]] | None = ()) -> None:
        """Ask all nodes for the state of their ranks."""
        self._folder.tell(restart=self._restart, look=peers)

    def close(self) -> None:
        """Emit no more events."""
        self._closing.set()

    def _follow(self) -> None:
        alive, beaten = {node.node_rank: node for node in self._plan.nodes}, time.monotonic()
        while alive and not self._closing.wait(_POLL_S):
            whys = self._whys  # read before the nodes' reports, which are emitted first
            for node in list(alive.values()):
                if self._look(node):
                    del alive[node.node_rank]
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                beaten = now
                for node in alive.values():
                    with contextlib.suppress(OSError):
                        os.utime(f"{node.state_dir}/lease")
                    self._beat(node)
            before, self._reported = self._reported, self._why_halted()
            if self._reported and self._reported != before:
                self._emit(log_line(self._plan.nodes[0].host, f"- | paceline: WARNING: {self._reported}"))
            if all(whys):  # by the second answer the nodes' last reports have arrived
                for node in alive.values():
                    self._emit(NodeLost(host=node.host, reason=whys[1]))
                break
        self._closing.set()

    def _ask(self) -> None:
        """Poll the scheduler until all nodes have ended."""
        while not self._closing.wait(_ASK_S):
            self._whys = (self._whys[1], self._why_gone())

    def _look(self, node: NodePlan) -> bool:
        """Emit what a node has written since the last read. True: its part has ended."""
        ended = self._folder.end_of(node.node_rank, self._plan.run_id)  # read before the log, which then is complete
        while lines := self._tails[node.node_rank].lines(last=ended is not None):
            for text in lines:
                self._emit(log_line(node.host, text))
        if ended is not None:
            self._emit(node_end(node.host, ended["exit"], time.time() - float(ended["now"])))
        elif not Path(node.state_dir).is_dir():
            self._emit(NodeLost(host=node.host, reason=REMOVED % node.run_dir, answers=True))
            return True
        return ended is not None

    def _beat(self, node: NodePlan) -> None:
        """Emit the newest report on a node's ranks, and its answers to ``look``."""
        beat = self._folder.beats(node.node_rank, self._plan.run_id)
        if beat is not None and beat.get("beat") != self._beats.get(node.node_rank):
            self._beats[node.node_rank] = beat["beat"]
            self._emit_parsed(node_beat, node, beat)
        looks = self._folder.looks(node.node_rank, self._plan.run_id)
        for look in looks[self._looks[node.node_rank] :]:
            self._emit_parsed(node_look, node, look)
        self._looks[node.node_rank] = len(looks)

    def _emit_parsed(self, read: Callable[[str, dict[str, Any]], Event], node: NodePlan, value: dict[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a damaged file
            self._emit(read(node.host, value))

    def _failed(self, why: str) -> None:
        for node in self._plan.nodes:
            self._emit(NodeLost(host=node.host, reason=f"can no longer be followed from here: {why}"))
