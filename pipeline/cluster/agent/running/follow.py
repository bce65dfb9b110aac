"""The live stream of a run from this node to the controller."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import sys
import threading
import time

from trainers.contract import run_folder
from trainers.contract.beats import NodeLook
from trainers.contract.records import as_json

from ..host.usage import UsageSampler
from ..node import own_node
from ..wire import REMOVED, Json, in_thread, read_json, say, touch, write_json
from .look import Beats, look
from .processes import POLL_S, end_tree, send_all, start_time
from .watches import Silence

FROZEN_S = 12.0  # long for a supervisor that looks twice a second, and short for a user who waits
HEARTBEAT_TIMEOUT_S = 8.0
SETTLED_S = 2.0  # a script's checkpoint counts as complete if nothing was written to it for this time
LAST_LOOK_S = 2.5  # for examinations under way at the end; one of an unreachable host takes 2 s


def follow(request: Json) -> None:
    """Stream the log, rank 0's metrics and the end as JSON lines; renew the lease by heartbeats from stdin.

    One line per second reports the ranks' states. Streams can be resumed: answers carry the byte offsets ``log_at`` and
    ``metrics_at``.
    """
    node = own_node(request)
    last_heartbeat, looks = [time.monotonic()], Looks(node)
    in_thread(listen, node, last_heartbeat, looks, on_error=leave)
    in_thread(leave_after_heartbeat_timeout, last_heartbeat, on_error=leave)
    try:
        send_news(request, node, looks)
    except OSError as error:  # the connection is closed, or a file can't be read: a new stream may succeed
        leave(str(error))


def leave(why: str) -> None:
    """End the stream at once, because the listening thread's read would delay an ordinary exit."""
    with contextlib.suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    os._exit(1)


class Looks:
    """Examine this node's ranks, or other nodes from here, each in its own thread."""

    def __init__(self, node: Json) -> None:
        self.node = node
        self.threads: list[threading.Thread] = []
        self.ready: list[NodeLook] = []

    def begin(self, peers: list[list[object]] | None) -> None:
        def make() -> None:
            self.ready.append(look(self.node, peers))

        self.threads.append(in_thread(make, on_error=lambda _: None))

    def send(self, *, last: bool) -> None:
        """Send what is ready; ``last``: also what will be ready in a moment. Raises OSError."""
        until = time.monotonic() + LAST_LOOK_S
        for thread in self.threads if last else ():
            thread.join(max(0.0, until - time.monotonic()))
        while self.ready:
            say(look=as_json(self.ready.pop()))


def send_news(request: Json, node: Json, looks: Looks) -> None:
    state = node["state_dir"]
    supervisor_file, usage = Silence(os.path.join(state, "beat")), UsageSampler(node["run_dir"])
    rank_beats = Beats(node)
    offsets = {"log": int(request["log_at"]), "metrics": int(request["metrics_at"])}
    files = {"log": os.path.join(state, "log")}
    if node["node_rank"] == 0 and request["metrics"]:
        files["metrics"] = os.path.join(node["run_dir"], run_folder.METRICS)
    reported_at, mark = time.monotonic(), f"{request['run_id']}:{node['node_rank']}"
    while True:
        ended = read_json(os.path.join(state, "exit.json")) or end_without_supervisor(node, supervisor_file, mark)
        while sum(forward(name, path, offsets) for name, path in files.items()):
            pass
        looks.send(last=bool(ended))
        if ended:
            say(exit=ended, now=time.time())
            os._exit(0)
        if time.monotonic() - reported_at > 1:
            reported_at = time.monotonic()
            newest = newest_change if request.get("of_script") else newest_checkpoint
            is_first_node = "metrics" in files
            saved = newest(node["run_dir"]) if is_first_node else 0
            say(beat=time.time(), ranks=as_json(rank_beats.read()), saved=saved, usage=as_json(usage.look()))
        time.sleep(POLL_S)


def newest_checkpoint(run_dir: str) -> int:
    """Return the step of the newest complete checkpoint, whose .json is written last; 0 without one."""
    sides = glob.glob(os.path.join(glob.escape(run_dir), "checkpoints/step-*.json"))
    matches = (re.fullmatch(r"step-(\d+)\.json", os.path.basename(path)) for path in sides)
    return max((int(name[1]) for name in matches if name), default=0)


def newest_change(run_dir: str) -> int:
    """Return when a script last wrote a checkpoint, in ms of unix time; 0 if there is none, or it may be writing."""
    newest = 0.0
    for folder, _, names in os.walk(os.path.join(run_dir, run_folder.CHECKPOINTS)):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    return int(newest * 1000) + 1 if newest and time.time() - newest > SETTLED_S else 0


def forward(name: str, path: str, offsets: dict[str, int]) -> bool:
    """Send the next complete lines of a file; return whether there were any."""
    try:
        with open(path, "rb") as file:
            # a resuming trainer cuts metrics.jsonl back to its checkpoint
            start_bytes = offsets[name] = min(offsets[name], os.fstat(file.fileno()).st_size)
            file.seek(start_bytes)
            data = file.read(1 << 18)
            if b"\n" not in data:  # one line that is longer (the supervisor cuts what ranks print)
                data += file.readline()
    except FileNotFoundError:
        return False
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        return False
    offsets[name] = start_bytes + len(whole)
    texts = whole.decode("utf-8", "replace").split("\n")[:-1]
    say(**{name: texts, "from": start_bytes, "at": offsets[name]})
    return True


def end_without_supervisor(node: Json, supervisor_file: Silence, mark: str) -> Json | None:
    """Kill the processes with ``mark`` if the supervisor is dead or frozen, and return the end; None while it lives."""
    state = node["state_dir"]
    if not os.path.isdir(state):
        return {"code": 1, "reason": REMOVED % node["run_dir"], "lost": True, "errors": [], "tail": []}
    entry = read_json(os.path.join(state, "agent.json"))
    frozen = supervisor_file.look() > FROZEN_S
    if entry is None or (start_time(entry["pid"]) == entry["born"] and not frozen):
        return None
    time.sleep(3 * POLL_S)  # an ending supervisor may be writing exit.json
    ended: Json | None = read_json(os.path.join(state, "exit.json"))
    if ended:
        return ended
    send_all({entry["pid"]} if start_time(entry["pid"]) == entry["born"] else set(), signal.SIGKILL)
    gone = end_tree(mark, 1.0, state)
    why = (
        "the run's supervisor on this host was killed; the host itself answers"
        if not frozen
        else f"the run's supervisor on this host was frozen for {FROZEN_S:.0f} s"
    )
    ended = {"code": -signal.SIGKILL, "reason": why, "lost": True, "errors": [], "tail": [], "gone": gone}
    with contextlib.suppress(OSError):  # a full disk, or the folder is removed right now
        write_json(os.path.join(state, "exit.json"), ended)
    return ended


def listen(node: Json, last_heartbeat: list[float], looks: Looks) -> None:
    """Renew the lease while the controller sends heartbeats, and follow its orders.

    ``stop`` makes the supervisor end the run; ``prune`` leaves a file that rank 0 looks for at the end of an epoch;
    ``look [peers]`` begins an examination of the ranks.
    """
    state = node["state_dir"]
    touch(os.path.join(state, "lease"))
    touch(os.path.join(state, "attached"))
    while line := sys.stdin.buffer.readline():
        last_heartbeat[0] = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.utime(os.path.join(state, "lease"))  # the supervisor looks for a change, not for the time
        if line.strip() == b"prune" and node["node_rank"] == 0:
            with contextlib.suppress(FileNotFoundError):
                touch(os.path.join(node["run_dir"], run_folder.PRUNE))
        if line.startswith(b"look "):
            looks.begin(json.loads(line[5:]))
        if line.strip() == b"stop":
            entry = read_json(os.path.join(state, "agent.json"))
            if entry and start_time(entry["pid"]) == entry["born"]:
                send_all({entry["pid"]}, signal.SIGTERM)


def leave_after_heartbeat_timeout(last_heartbeat: list[float]) -> None:
    """End the stream after HEARTBEAT_TIMEOUT_S without a heartbeat: a cut connection can block writes for minutes."""
    while time.monotonic() - last_heartbeat[0] < HEARTBEAT_TIMEOUT_S:
        time.sleep(0.5)
    os._exit(1)
