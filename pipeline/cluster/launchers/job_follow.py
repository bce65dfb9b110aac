"""The live side of a batch job: its nodes' logs and ends, read from the folders that they share with the controller.

The scheduler is asked in a thread of its own: one that hangs would keep the lease's beats and the output back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.log_lines import Tail
from pipeline.cluster.agent.wire import REMOVED
from pipeline.cluster.launchers.answers import log_line, node_end
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.core import threads
from pipeline.core.specs import Event, LaunchPlan, NodeLost, NodePlan
from trainers.contract.beats import NodeBeat, NodeLook

BEAT_S = 1.0
_POLL_S = 0.1
_ASK_S = 5.0  # between two looks at the queue: what a node tells itself comes sooner


class JobFollower:
    """Follows every node of one start; one thread for all, and one that asks the scheduler. ``emit`` is called from the
    first.

    Args:
        restart: which life of the job the start belongs to.
        gone: why the job runs no more; '' while it does, or while Slurm doesn't answer.
        standing: why its ranks stand still, as it was last told; '': they don't.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: JobFolder,
        restart: int,
        gone: Callable[[], str],
        emit: Callable[[Event], None],
        standing: Callable[[], str] = lambda: "",
    ) -> None:
        self._plan, self._folder, self._restart, self._gone, self._emit = plan, folder, restart, gone, emit
        self._standing, self._said = standing, ""
        self._closing = threading.Event()
        self._tails = {node.node_rank: Tail(f"{node.state_dir}/log") for node in plan.nodes}
        self._beats: dict[int, float] = {}  # node rank → the node's time of the newest one
        self._looks = {node.node_rank: len(folder.looks(node.node_rank, plan.run_id)) for node in plan.nodes}
        self._whys = ("", "")  # the two newest answers of ``gone``
        threads.start(self._follow, name="follow the job", on_error=self._failed)
        threads.start(self._ask, name="ask the scheduler", on_error=self._failed)

    def stop(self) -> None:
        """Ask every node to end its part."""
        self._folder.end(self._restart)

    def prune(self) -> None:
        """Rank 0 sees the controller's wish itself: it lies in the folder that they share."""

    def look(self, peers: Sequence[tuple[str, int]] | None = ()) -> None:
        self._folder.look(self._restart, peers)

    def close(self) -> None:
        """No more events."""
        self._closing.set()

    def _follow(self) -> None:
        alive, beaten = {node.node_rank: node for node in self._plan.nodes}, time.monotonic()
        while alive and not self._closing.wait(_POLL_S):
            whys = self._whys  # before the look: what a node has told itself by then comes first
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
            self._say_standing()
            if all(whys):  # the second answer came after their last words had had time to come
                for node in alive.values():
                    self._emit(NodeLost(host=node.host, reason=whys[1]))
                break
        self._closing.set()

    def _ask(self) -> None:
        """What the scheduler says of the job, until all nodes have ended."""
        while not self._closing.wait(_ASK_S):
            self._whys = (self._whys[1], self._gone())

    def _say_standing(self) -> None:
        """Once when it begins."""
        before, self._said = self._said, self._standing()
        if self._said and self._said != before:
            self._emit(log_line(self._plan.nodes[0].host, f"- | paceline: WARNING: {self._said}"))

    def _look(self, node: NodePlan) -> bool:
        """Pass on what a node has written since the last look. True: its part has ended."""
        ended = self._folder.end_of(node.node_rank, self._plan.run_id)  # before the log, which is complete then
        while lines := self._tails[node.node_rank].lines(last=ended is not None):
            for text in lines:
                self._emit(log_line(node.host, text))
        if ended is not None:
            self._emit(node_end(node.host, ended["exit"], time.time() - float(ended["now"])))
        elif not Path(node.state_dir).is_dir():
            self._emit(NodeLost(host=node.host, reason=REMOVED % node.run_dir))
            return True
        return ended is not None

    def _beat(self, node: NodePlan) -> None:
        """Pass on where the ranks of a node stand, and its answers to looks at them."""
        told = self._folder.beats(node.node_rank, self._plan.run_id)
        if told is not None and told.get("beat") != self._beats.get(node.node_rank):
            self._beats[node.node_rank] = told["beat"]
            self._tell(NodeBeat.of, node, told)
        looks = self._folder.looks(node.node_rank, self._plan.run_id)
        for look in looks[self._looks[node.node_rank] :]:
            self._tell(NodeLook.of, node, look)
        self._looks[node.node_rank] = len(looks)

    def _tell(self, read: Callable[[str, dict[str, Any]], Event], node: NodePlan, value: dict[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a file that somebody has damaged
            self._emit(read(node.host, value))

    def _failed(self, why: str) -> None:
        for node in self._plan.nodes:
            self._emit(NodeLost(host=node.host, reason=f"can no longer be followed from here: {why}"))
