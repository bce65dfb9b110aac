"""The agent of a batch job's node: reports the node's facts, then executes one start after another.

Controller and nodes communicate through files in the job's shared folder. All of them are created before the job is
submitted, and only grow: NFS shows appended data when a file is reopened, but may hide a new file for half a minute.
The controller writes ``orders``, each node its ``node-<number>``; a line is one JSON object. Only ``beats-<number>``
with the ranks' states is overwritten, because it would grow for days. The request's ``scheduler`` names the class that
identifies this node.
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

from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json

from ..host.network import interfaces
from ..host.probe import facts
from ..host.usage import UsageSampler
from ..node import own_node
from ..schedulers import SCHEDULERS
from ..wire import Json, in_thread, read_json, refuse
from .look import Beats, look
from .processes import Orphans
from .registry import end_attempts
from .supervisor import Supervisor, lay_out
from .watches import Silence

POLL_S = 0.1
BEAT_S = 1.0
KEEP_S = 30.0  # nodes are kept after a bad end, so that the next attempt needn't wait in the queue


def job(request: Json) -> None:
    """Serve until the controller releases this node, or is silent for too long.

    A node whose part has ended well stays too, because other parts may have failed, and another start needs it.
    """
    Orphans.adopt()
    node = JobNode(request)
    secrets = node.scheduler.secrets(request)
    if not node.scheduler.REQUEUES:
        signal.signal(signal.SIGTERM, leave)  # by default it doesn't end the first process of a container
    node.report(facts=as_json(node.facts()))
    code, patience_s = None, float(request["lease_s"])
    for start in node.starts(patience_s):
        code = node.run(start, secrets)
        if node.terminated and not node.scheduler.REQUEUES:
            leave()
        # after its own signal the scheduler decides about the job, and can't requeue one that has ended
        node.patience_s = patience_s if node.terminated else KEEP_S
    if code is None:
        refuse(f"{node.name}: nothing was started: the controller was not heard of for {patience_s:g} s")
    if code != 0:
        refuse(f"{node.name}: the last start ended with exit code {code}")


def leave(*_: Any) -> NoReturn:
    """End this agent if the scheduler wants its node back."""
    refuse("ended by SIGTERM")


class JobNode:
    """This node's part of one batch job. Raises SystemExit: its folder isn't shared."""

    def __init__(self, request: Json) -> None:
        self.request, self.folder = request, request["folder"]
        self.scheduler = SCHEDULERS[request["scheduler"]]()
        self.name, self.number, self.restart = self.scheduler.who()
        self.path = os.path.join(self.folder, f"node-{self.number}")
        if not os.path.isfile(self.path):
            refuse(
                f"{self.name}: {self.folder} isn't there; all nodes must share the folder of runs: "
                "set paths.runs to one on a file system that they share"
            )
        if os.path.getsize(self.path) and not self.scheduler.REQUEUES:
            refuse(f"{self.name}: this node of the job was started a second time, and is not taken up again")
        self.taken = 0
        self.terminated = False
        self.patience_s = 0.0
        self.identity = ""
        self.report_lock = threading.Lock()

    def report(self, **fields: Any) -> None:
        """Write a line for the controller; unnecessary if the folder was removed."""
        if os.path.isfile(self.path):
            with self.report_lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"restart": self.restart, "now": time.time(), **fields}) + "\n")

    def facts(self) -> HostFacts:
        """Return the probe's facts, with the scheduler's name for this node and the address that others use."""
        found = facts({**self.request["probe"], "local": True})
        held = {name: address for address, name in reversed(list(interfaces().items()))}
        chosen = held.get(self.request["interface"] or "")
        address = chosen or self.scheduler.own_address()
        self.identity = f"{self.name} {address}:0 uid {os.getuid()}"
        return found._replace(host=self.name, identity=self.identity, address=address)

    def next_order(self) -> tuple[int, Json] | None:
        """Return the first new order for this restart of the job, and how many were taken then; None: no more."""
        try:
            with open(os.path.join(self.folder, "orders"), encoding="utf-8") as file:
                lines = file.read().split("\n")[:-1]
        except OSError:  # the run's folder was removed
            return self.taken, {"leave": True}
        for number, line in enumerate(lines[self.taken :], start=self.taken + 1):
            order: Json = json.loads(line)
            if order.get("restart", self.restart) == self.restart:
                return number, order
        return None

    def starts(self, patience_s: float) -> Iterator[Json]:
        """Yield the controller's starts, until it releases the node, or is silent for ``patience_s``."""
        self.patience_s, since = patience_s, time.monotonic()
        orders = Silence(os.path.join(self.folder, "orders"))
        while min(orders.look(), time.monotonic() - since) < self.patience_s:
            numbered = self.next_order()
            if numbered is None:
                time.sleep(POLL_S)
                continue
            self.taken, order = numbered
            if "leave" in order:
                return
            if "start" in order:
                yield order["start"]
                since = time.monotonic()

    def run(self, start: Json, secrets: Json) -> int:
        """Run torchrun of one start to the end of everything it owns, and report the end. Returns its exit code."""
        node_fields = {
            "identity": self.identity,
            "env_passed": self.request["env_passed"],
            "hide": secrets.get("hide", []),
        }
        request = {**start, **node_fields}
        node = own_node(request)
        node["env"] = {**node["env"], **secrets.get("env", {})}
        left, ended = end_attempts(request), None
        answer = {"error": f"an earlier attempt of this run cannot be ended: processes {sorted(left)}"} if left else {}
        if not left:
            lay_out(node)
            supervisor, over = Supervisor(request, node), threading.Event()
            in_thread(self.listen, start["run_id"], node, supervisor, over, on_error=supervisor.end)
            in_thread(self.beat, start["run_id"], node, over, on_error=lambda _: None)
            supervisor.run(answer.update)
            over.set()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the start has ended; its end must be reported
            self.terminated = supervisor.signalled
            ended = read_json(os.path.join(node["state_dir"], "exit.json"))
        if ended is None:
            ended = {"code": 1, "reason": answer.get("error", "the node agent ended"), "errors": [], "tail": []}
        with contextlib.suppress(OSError):
            self.report(run_id=start["run_id"], exit=ended, terminated=self.terminated)
        if not self.scheduler.REQUEUES:
            signal.signal(signal.SIGTERM, leave)
        return int(ended["code"])

    def listen(self, run_id: str, node: Json, supervisor: Supervisor, over: threading.Event) -> None:
        """End the run, or examine the ranks, when the controller asks for it."""
        while not over.wait(POLL_S):
            numbered = self.next_order()
            if numbered is None:
                continue
            number, order = numbered
            if "look" in order:
                self.taken = number
                in_thread(self.look, run_id, node, order["look"], on_error=lambda _: None)
            else:  # after a start only an end can follow
                supervisor.end("stopped")

    def look(self, run_id: str, node: Json, peers: list[list[object]] | None) -> None:
        """Report what can be seen of the ranks from outside."""
        seen = look(node, peers)
        with contextlib.suppress(OSError):
            self.report(run_id=run_id, look=as_json(seen))

    def beat(self, run_id: str, node: Json, over: threading.Event) -> None:
        """Write the ranks' states once per second; unnecessary if the folder was removed."""
        path = os.path.join(self.folder, f"beats-{self.number}")
        usage, beats = UsageSampler(node["run_dir"]), Beats(node)
        while not over.wait(BEAT_S):
            beat = {"ranks": as_json(beats.read()), "usage": as_json(usage.look())}
            line = json.dumps({"run_id": run_id, "beat": time.time(), **beat})
            with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8") as file:
                file.write(line)
                file.truncate()
