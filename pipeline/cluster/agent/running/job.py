"""What each node of a batch job runs: it reports its facts, then executes one start after another.

Controller and nodes communicate through files in the job's shared folder. All of them are created before the job is
submitted, and only grow: NFS shows appended data when a file is reopened, but may hide a new file for half a minute.
``orders`` is the controller's, ``node-<number>`` each node's; a line is one JSON object. The ranks' states are
overwritten in ``beats-<number>``, which would grow for days. The request's ``scheduler`` names the module that tells
which node of the job this is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NoReturn

from trainers.contract.beats import as_json

from ..host.probe import interfaces, probe
from ..host.usage import UsageSampler
from ..node import own_node
from ..wire import Json, in_thread, read_json, refuse
from .look import Beats, look
from .processes import Orphans
from .registry import end_attempts
from .starting import lay_out
from .supervisor import Supervisor
from .watches import Silence

POLL_S = 0.1
BEAT_S = 1.0
KEEP_S = 30.0  # how long the nodes are kept after a bad end: the next attempt takes them without waiting in the queue


def job(request: Json) -> None:
    """Serve until the controller releases this node, or has nothing for it to do.

    A node whose part has ended well stays too: other parts may have failed, and then another start needs it.
    """
    Orphans.adopt()
    node = JobNode(request)
    secrets = node.scheduler.secrets(request)
    if not node.scheduler.REQUEUES:
        signal.signal(signal.SIGTERM, leave)  # the first process of a container is not ended by it otherwise
    node.tell(facts=node.facts())
    code, patience_s = None, float(request["lease_s"])
    for start in node.starts(patience_s):
        code = node.run(start, secrets)
        if node.terminated and not node.scheduler.REQUEUES:
            leave()
        # after the scheduler's own signal it decides what becomes of the job: one that has left can't be requeued
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
        self.scheduler = import_module(f".{request['scheduler']}", __package__)
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
        self.telling = threading.Lock()

    def tell(self, **fields: Any) -> None:
        """Write a line for the controller; unnecessary if the folder was removed."""
        if os.path.isfile(self.path):
            with self.telling, open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"restart": self.restart, "now": time.time(), **fields}) + "\n")

    def facts(self) -> Json:
        """Return the probe's facts, with the scheduler's name for this node and the address that others use."""
        facts: Json = {}
        probe({**self.request["probe"], "local": True}, facts.update)
        held = {name: address for address, name in reversed(list(interfaces().items()))}
        chosen = held.get(self.request["interface"] or "")
        address = chosen or self.scheduler.own_address()
        self.identity = f"{self.name} {address}:0 uid {os.getuid()}"
        return {**facts, "host": self.name, "identity": self.identity, "address": address}

    def next_order(self) -> tuple[int, Json] | None:
        """Return the first new order for this life of the job, and the number of orders then taken; None: no more."""
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
            answer = supervise(supervisor)
            over.set()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left is to wait
            self.terminated = supervisor.signalled
            ended = read_json(os.path.join(node["state_dir"], "exit.json"))
        if ended is None:
            ended = {"code": 1, "reason": answer.get("error", "the node agent ended"), "errors": [], "tail": []}
        with contextlib.suppress(OSError):
            self.tell(run_id=start["run_id"], exit=ended, terminated=self.terminated)
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
            else:  # nothing else but an end can follow a start
                supervisor.end("stopped")

    def look(self, run_id: str, node: Json, peers: list[list[object]] | None) -> None:
        """Report what can be seen of the ranks from outside."""
        seen = look(node, peers)
        with contextlib.suppress(OSError):
            self.tell(run_id=run_id, look=as_json(seen))

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


def supervise(supervisor: Supervisor) -> Json:
    """Run a start to its end; return its answer."""
    answer_end, tell = os.pipe()
    supervisor.run(tell)
    with os.fdopen(answer_end, "r", encoding="utf-8") as pipe:
        text = pipe.read()
    answer: Json = json.loads(text) if text else {}
    return answer
