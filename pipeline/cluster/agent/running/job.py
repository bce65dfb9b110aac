"""The agent of a node in a scheduler's job: reports the node's facts, then executes one start after another.

Controller and nodes communicate through files in the job's shared folder. The controller appends to ``orders``, a node
appends to ``node-<number>`` and overwrites ``beats-<number>``. All are made before the job is submitted, because NFS
may hide a new file for half a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from trainers.contract.beats import NodeBeat
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json, from_json

from ..host.probe import facts, interfaces
from ..host.usage import UsageSampler
from ..node import own_node
from ..requests import (
    Access,
    ExamineOrder,
    JobBeat,
    JobOrder,
    JobReport,
    JobRequest,
    NodeEnd,
    NodeStart,
    Secrets,
    StartRequest,
)
from ..schedulers import SCHEDULERS
from ..wire import Silence, in_thread, read_record, refuse
from .examination import RankBeats, examine
from .processes import Orphans
from .registry import Registry
from .start import end_earlier, lay_out
from .supervisor import Supervisor

POLL_S = 0.1
BEAT_S = 1.0
KEEP_S = 30.0  # a node stays for so long after an end, so that the next attempt needn't wait in the queue


def job(request: JobRequest) -> None:
    """Execute starts until the controller releases this node, or is silent for too long."""
    Orphans.adopt()
    node = JobNode(request)
    secrets = node.scheduler.secrets(request)
    if not node.scheduler.REQUEUES:
        signal.signal(signal.SIGTERM, leave)  # the first process of a container ignores it by default
    node.report(facts=as_json(node.facts()))
    code = None
    for start in node.starts(request.lease_s):
        code = node.run(start, secrets)
        if node.was_terminated and not node.scheduler.REQUEUES:
            leave()
        # the scheduler decides what follows its SIGTERM: wait, because it can't requeue a job that has ended
        node.patience_s = request.lease_s if node.was_terminated else KEEP_S
    if code is None:
        refuse(f"{node.name}: nothing was started: the controller was not heard of for {request.lease_s:g} s")
    if code != 0:
        refuse(f"{node.name}: the last start ended with exit code {code}")


def leave(*_: Any) -> NoReturn:
    """Handle the SIGTERM with which a scheduler takes its node back."""
    refuse("ended by SIGTERM")


class JobNode:
    """This node's part of one batch job. Raises SystemExit: its folder isn't shared."""

    def __init__(self, request: JobRequest) -> None:
        self.request, self.folder = request, request.folder
        self.scheduler = SCHEDULERS[request.scheduler]()
        self.name, self.number, self.restart = self.scheduler.who()
        self.path = os.path.join(self.folder, f"node-{self.number}")
        if not os.path.isfile(self.path):
            refuse(
                f"{self.name}: {self.folder} isn't there; all nodes must share the folder of runs: "
                "set paths.runs to one on a file system that they share"
            )
        if os.path.getsize(self.path) and not self.scheduler.REQUEUES:
            refuse(f"{self.name}: this node of the job was started a second time, and is not taken up again")
        self.orders_done = 0  # number of lines of ``orders`` that were followed
        self.was_terminated = False  # the scheduler ended the newest start with SIGTERM
        self.patience_s = 0.0  # how long the controller may be silent between two starts
        self.identity = ""
        self.report_lock = threading.Lock()

    def report(self, **fields: Any) -> None:
        """Write a line for the controller: fields of ``JobReport``."""
        if os.path.isfile(self.path):  # else the folder was removed, and nobody reads reports any more
            line = json.dumps(as_json(JobReport(restart=self.restart, now=time.time(), **fields)))
            with self.report_lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def facts(self) -> HostFacts:
        """Return the probe's facts, with the scheduler's name for this node and the address that others use."""
        probed = facts(self.request.probe._replace(access=Access(is_local=True)))
        by_interface = {name: address for address, name in reversed(list(interfaces().items()))}  # first address wins
        address = by_interface.get(self.request.interface or "") or self.scheduler.own_address()
        self.identity = f"{self.name} {address}:0 uid {os.getuid()}"
        return probed._replace(host=self.name, identity=self.identity, address=address)

    def next_order(self) -> tuple[int, JobOrder] | None:
        """Return (number of orders up to this one, next order for this restart of the job); None: no new order."""
        try:
            with open(os.path.join(self.folder, "orders"), encoding="utf-8") as file:
                lines = file.read().split("\n")[:-1]  # without a line that is just being written
        except OSError:  # the run's folder was removed
            return self.orders_done, JobOrder(leave=True)
        for number, line in enumerate(lines[self.orders_done :], start=self.orders_done + 1):
            order = from_json(JobOrder, json.loads(line))
            if order.restart in (None, self.restart):
                return number, order
        return None

    def starts(self, patience_s: float) -> Iterator[StartRequest]:
        """Yield the controller's starts, until it releases the node, or is silent for ``patience_s``."""
        self.patience_s, idle_since = patience_s, time.monotonic()
        orders = Silence(os.path.join(self.folder, "orders"))
        # during a start the controller may be silent, so the silence counts from its end
        while min(orders.look(), time.monotonic() - idle_since) < self.patience_s:
            numbered = self.next_order()
            if numbered is None:
                time.sleep(POLL_S)
                continue
            self.orders_done, order = numbered
            if order.leave:
                return
            if order.start is not None:
                yield order.start
                idle_since = time.monotonic()

    def run(self, start: StartRequest, secrets: Secrets) -> int:
        """Execute one start until all of its processes have ended, report the end, and return torchrun's exit code."""
        start = start._replace(
            access=Access(identity=self.identity),
            env_passed=self.request.env_passed,
            masking_rules=secrets.masking_rules,
        )
        node = own_node(start.nodes, start.access)
        node = node._replace(env={**node.env, **secrets.env})
        end = None
        try:
            end_earlier(Registry(start.registry, start.access), start.attempt_prefix)
        except SystemExit as error:  # only this start fails: the node stays for others
            why = str(error)
        else:
            lay_out(node)
            why = self.supervise(start, node)
            end = read_record(NodeEnd, os.path.join(node.state_dir, "exit.json"))
        end = end or NodeEnd(code=1, reason=why or "the node agent ended")
        with contextlib.suppress(OSError):
            self.report(run_id=start.run_id, end=end, was_terminated=self.was_terminated)
        if not self.scheduler.REQUEUES:
            signal.signal(signal.SIGTERM, leave)
        return end.code

    def supervise(self, start: StartRequest, node: NodeStart) -> str:
        """Run torchrun to its end, following orders and writing heartbeats. Return why it couldn't start, or ''."""
        supervisor, over = Supervisor(start, node), threading.Event()
        in_thread(self.listen, start.run_id, node, supervisor, over, on_error=supervisor.end)
        in_thread(self.beat, start.run_id, node, over, on_error=lambda _: None)
        why = supervisor.begin()
        if not why:
            supervisor.run()
        over.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the start has ended; its end must be reported
        self.was_terminated = supervisor.was_terminated
        return why

    def listen(self, run_id: str, node: NodeStart, supervisor: Supervisor, over: threading.Event) -> None:
        """Follow orders during a start: examine the ranks, or end the start."""
        while not over.wait(POLL_S):
            numbered = self.next_order()
            if numbered is None:
                continue
            number, order = numbered
            if order.examine is not None:
                self.orders_done = number
                in_thread(self.examine, run_id, node, order.examine, on_error=lambda _: None)
            else:  # any other order ends the start; ``starts`` follows it afterwards, as it isn't counted as done
                supervisor.end("stopped")

    def examine(self, run_id: str, node: NodeStart, order: ExamineOrder) -> None:
        examination = examine(node, order)
        with contextlib.suppress(OSError):
            self.report(run_id=run_id, examination=examination)

    def beat(self, run_id: str, node: NodeStart, over: threading.Event) -> None:
        """Write the ranks' states once per second."""
        path = os.path.join(self.folder, f"beats-{self.number}")
        usage, rank_beats = UsageSampler(node.run_dir), RankBeats(node)
        while not over.wait(BEAT_S):
            beat = NodeBeat(node.host, tuple(rank_beats.read()), usage=usage.look())
            line = json.dumps(as_json(JobBeat(run_id, time.time(), beat)))
            # r+: the file exists, unless the folder was removed and nobody reads it any more
            with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8") as file:
                file.write(line)
                file.truncate()
