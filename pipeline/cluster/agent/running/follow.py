"""Answer a ``FollowRequest``: stream a start's log, metrics and heartbeats to the controller, until its end.

The stream may break and be opened anew from the last offset. The ranks and their supervisor don't depend on it, but
the heartbeats that come from the controller on stdin renew their lease.
"""

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
from typing import NoReturn

from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.records import from_json

from ..host.usage import UsageSampler
from ..node import newest_write_ms, own_node
from ..requests import ExamineOrder, FollowRequest, Lines, NodeEnd, NodeStart, RegistryEntry
from ..wire import REMOVED, Silence, in_thread, read_record, say, touch, write_json
from .examination import RankBeats, examine
from .processes import POLL_S, end_tree, send_all
from .registry import is_alive

FROZEN_S = 12.0  # a supervisor without a beat for so long counts as frozen; normally it gives two a second
HEARTBEAT_TIMEOUT_S = 8.0
LAST_EXAMINATION_S = 2.5  # limit at the end for examinations under way; one of an unreachable host takes 2 s
_BEAT_S = 1.0


def follow(request: FollowRequest) -> None:
    """Stream this node's part of a start, from the requested offsets on; heartbeats on stdin renew the lease."""
    node = own_node(request.nodes, request.access)
    controller = Controller(node)
    in_thread(controller.listen, on_error=leave)
    in_thread(controller.leave_after_silence, on_error=leave)
    try:
        stream(request, node, controller)
    except OSError as error:  # the connection is closed, or a file can't be read: the controller tries another stream
        leave(str(error))


def leave(why: str = "") -> NoReturn:
    """End this process at once. An ordinary exit would wait for the thread that reads stdin."""
    with contextlib.suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    os._exit(1)


class Controller:
    """The controller at the other end of the stream: its heartbeats, its orders, and the examinations it wants."""

    def __init__(self, node: NodeStart) -> None:
        self.node = node
        self.heard_at = time.monotonic()
        self.threads: list[threading.Thread] = []
        self.examinations: list[NodeExamination] = []  # complete ones, to be sent

    def listen(self) -> None:
        """Read stdin. Each line renews the lease; orders: ``stop``, ``prune`` (end after this epoch), ``examine …``."""
        lease = os.path.join(self.node.state_dir, "lease")
        touch(lease)
        touch(os.path.join(self.node.state_dir, "attached"))
        while line := sys.stdin.buffer.readline():
            self.heard_at = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.utime(lease)  # the supervisor looks for a change, not for the time
            word, _, rest = line.strip().partition(b" ")
            if word == b"prune" and self.node.node_rank == 0:
                with contextlib.suppress(FileNotFoundError):
                    touch(os.path.join(self.node.run_dir, run_folder.PRUNE))
            if word == b"examine":
                order = from_json(ExamineOrder, json.loads(rest))
                self.threads.append(in_thread(self.examine, order, on_error=lambda _: None))
            if word == b"stop":
                entry = read_record(RegistryEntry, os.path.join(self.node.state_dir, "agent.json"))
                if entry is not None and is_alive(entry):
                    send_all({entry.pid}, signal.SIGTERM)

    def examine(self, order: ExamineOrder) -> None:
        self.examinations.append(examine(self.node, order))

    def send_examinations(self, *, last: bool) -> None:
        """Send complete examinations; ``last``: wait a moment for those under way. Raises OSError."""
        until = time.monotonic() + LAST_EXAMINATION_S
        for thread in self.threads if last else ():
            thread.join(max(0.0, until - time.monotonic()))
        while self.examinations:
            say(examination=self.examinations.pop())

    def leave_after_silence(self) -> None:
        """End the stream some seconds after the last heartbeat: a cut connection can block writes for minutes."""
        while time.monotonic() - self.heard_at < HEARTBEAT_TIMEOUT_S:
            time.sleep(0.5)
        leave()


def stream(request: FollowRequest, node: NodeStart, controller: Controller) -> None:
    """Send lines, states and examinations until this node's part has ended. Raises OSError."""
    supervisor_beat, usage = Silence(os.path.join(node.state_dir, "beat")), UsageSampler(node.run_dir)
    rank_beats, mark = RankBeats(node), f"{request.run_id}:{node.node_rank}"
    sends_metrics = node.node_rank == 0 and request.sends_metrics
    files = [GrowingFile("log", os.path.join(node.state_dir, "log"), request.log_offset_bytes)]
    if sends_metrics:
        metrics = os.path.join(node.run_dir, run_folder.METRICS)
        files.append(GrowingFile("metrics", metrics, request.metrics_offset_bytes))
    newest_saved = newest_write_ms if request.is_script else newest_checkpoint
    reported_at = time.monotonic()
    while True:
        # look for the end before the lines are sent: so none of the lines before the end is missed
        end = read_record(NodeEnd, os.path.join(node.state_dir, "exit.json"))
        end = end or end_without_supervisor(node, supervisor_beat, mark)
        while sum(file.send_lines() for file in files):
            pass
        controller.send_examinations(last=end is not None)
        if end is not None:
            say(end=end, now=time.time())
            os._exit(0)
        if time.monotonic() - reported_at > _BEAT_S:
            reported_at = time.monotonic()
            saved = newest_saved(node.run_dir) if sends_metrics else 0  # only rank 0's node has checkpoints
            say(beat=NodeBeat(node.host, tuple(rank_beats.read()), saved, usage.look()))
        time.sleep(POLL_S)


def newest_checkpoint(run_dir: str) -> int:
    """Return the step of the newest complete checkpoint; 0 without one. Of its files, the .json is written last."""
    notes = glob.glob(os.path.join(glob.escape(run_dir), "checkpoints/step-*.json"))
    matches = (re.fullmatch(r"step-(\d+)\.json", os.path.basename(path)) for path in notes)
    return max((int(name[1]) for name in matches if name), default=0)


class GrowingFile:
    """A file whose complete lines are sent from ``offset`` (bytes) on."""

    def __init__(self, name: str, path: str, offset: int) -> None:
        self.name, self.path, self.offset = name, path, offset

    def send_lines(self) -> bool:
        """Send the next complete lines; return whether there were any. Raises OSError."""
        try:
            with open(self.path, "rb") as file:
                # a resuming trainer cuts metrics.jsonl back to its checkpoint
                start_bytes = self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
                file.seek(start_bytes)
                data = file.read(1 << 18)
                if b"\n" not in data:  # a single longer line: of metrics, as the supervisor cuts long lines of the log
                    data += file.readline()
        except FileNotFoundError:
            return False
        whole_lines = data[: data.rfind(b"\n") + 1]
        if not whole_lines:
            return False
        self.offset = start_bytes + len(whole_lines)
        texts = whole_lines.decode("utf-8", "replace").split("\n")[:-1]
        say(lines=Lines(self.name, tuple(texts), start_bytes, self.offset))
        return True


def end_without_supervisor(node: NodeStart, supervisor_beat: Silence, mark: str) -> NodeEnd | None:
    """Kill the processes of a start whose supervisor is dead or frozen, and return its end; None while it lives."""
    if not os.path.isdir(node.state_dir):
        return NodeEnd(code=1, reason=REMOVED % node.run_dir, lost=True)
    entry = read_record(RegistryEntry, os.path.join(node.state_dir, "agent.json"))
    is_frozen = supervisor_beat.look() > FROZEN_S
    if entry is None or (is_alive(entry) and not is_frozen):
        return None
    time.sleep(3 * POLL_S)  # an ending supervisor may be writing exit.json
    if end := read_record(NodeEnd, os.path.join(node.state_dir, "exit.json")):
        return end
    # nobody else ends the ranks now; a frozen supervisor first, so that it doesn't wake up meanwhile
    send_all({entry.pid} if is_alive(entry) else set(), signal.SIGKILL)
    is_gone = end_tree(mark, 1.0, node.state_dir)
    reason = (
        f"the run's supervisor on this host was frozen for {FROZEN_S:.0f} s"
        if is_frozen
        else "the run's supervisor on this host was killed; the host itself answers"
    )
    end = NodeEnd(code=-signal.SIGKILL, reason=reason, lost=True, gone=is_gone)
    with contextlib.suppress(OSError):  # a full disk, or the folder is removed right now
        write_json(os.path.join(node.state_dir, "exit.json"), end)
    return end
