"""Live streams from all nodes: one child and two threads a node, reconnecting where a connection breaks."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from subprocess import Popen
from typing import Any

from pipeline import shell
from pipeline.types import Event, LogLine, MetricsLine, NodeExit, NodeLost, RankError

LOST_S = 6.0  # of silence: ssh notices after 3 to 4, one try to reconnect fits in, others are down within 10
BEAT_S = 1.0
_ANSWER = b"@paceline "


class Streams:
    """Follows every node of one attempt. ``emit`` is called from the reading threads.

    Args:
        argvs: host label → the command of a live agent there.
        opening: byte offsets to go on from → what the agent reads first.
    """

    def __init__(
        self,
        argvs: Mapping[str, list[str]],
        opening: Callable[[dict[str, int]], bytes],
        emit: Callable[[Event], None],
        metrics_at: int,
    ) -> None:
        self._stopping = threading.Event()
        self._pruning = False
        self._closing = threading.Event()
        self._streams = [
            _Stream(label, argv, opening, emit, self._closing, metrics_at) for label, argv in argvs.items()
        ]
        for stream in self._streams:
            threading.Thread(target=stream.read, daemon=True, name=f"follow {stream.label}").start()
        threading.Thread(target=self._beat, daemon=True, name="beats").start()

    def _beat(self) -> None:
        """Renew every node's lease, and pass a wish on until its end is heard of (a stream may have broken)."""
        while not self._closing.is_set():
            word = b"prune\n" if self._pruning else b"beat\n"
            self._tell(b"stop\n" if self._stopping.is_set() else word)
            if not self._stopping.wait(BEAT_S):
                continue
            self._closing.wait(BEAT_S / 2)

    def _tell(self, word: bytes) -> None:
        for stream in self._streams:
            stream.write(word)

    def prune(self) -> None:
        """Ask rank 0 to end the run, with a checkpoint, at the next end of an epoch."""
        self._pruning = True
        self._tell(b"prune\n")

    def stop(self) -> None:
        """Ask every node that still answers to end its part."""
        self._stopping.set()

    def close(self) -> None:
        """End the streams."""
        self._closing.set()
        self._stopping.set()
        for stream in self._streams:
            stream.end()


class _Stream:
    def __init__(
        self,
        label: str,
        argv: list[str],
        opening: Callable[[dict[str, int]], bytes],
        emit: Callable[[Event], None],
        closing: threading.Event,
        metrics_at: int,
    ) -> None:
        self.label = label
        self._argv, self._opening, self._emit, self._closing = argv, opening, emit, closing
        self._offsets = {"log_at": 0, "metrics_at": metrics_at}
        self._child: Popen[bytes] | None = None
        self._said = ""

    def read(self) -> None:
        """Until the node's end is known: read, and reconnect for a few seconds where the stream breaks."""
        heard = time.monotonic()
        while not self._closing.is_set():
            for value in self._answers():
                heard = time.monotonic()
                if self._take(value):
                    return
            if time.monotonic() - heard > LOST_S:
                break
            self._closing.wait(0.3)
        if not self._closing.is_set():
            self._emit(NodeLost(host=self.label, reason=f"no longer answers: {self._said or 'the connection ended'}"))

    def _answers(self) -> Any:
        """The JSON lines of one connection."""
        child = shell.stream(self._argv)
        self._child = child
        if child.stdout is None or child.stderr is None:
            raise RuntimeError("a stream has pipes")
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        self.write(self._opening(self._offsets))
        for line in child.stdout:
            if line.startswith(_ANSWER):
                yield json.loads(line[len(_ANSWER) :])
        child.wait()

    def _listen(self, child: Popen[bytes]) -> None:
        """Keep the last line of stderr: it says why a connection ended."""
        if child.stderr is not None:
            for line in child.stderr:
                self._said = line.decode(errors="replace").strip() or self._said

    def write(self, data: bytes) -> None:
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a broken stream shows at its reading end
                child.stdin.write(data)
                child.stdin.flush()

    def end(self) -> None:
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()

    def _take(self, value: dict[str, Any]) -> bool:
        """Turn one answer into events. True: the node has ended."""
        if "log" in value:
            for line in value["log"]:
                rank, _, text = line.partition(" | ")
                self._emit(LogLine(host=self.label, rank=int(rank) if rank != "-" else None, text=text))
            self._offsets["log_at"] = value["at"]
        elif "metrics" in value:
            for line in value["metrics"]:
                self._emit(MetricsLine(text=line))
            self._offsets["metrics_at"] = value["at"]
        elif "exit" in value:
            self._emit(node_exit(self.label, value["exit"], time.time() - value["now"]))
            return True
        elif "error" in value:
            self._emit(NodeLost(host=self.label, reason=value["error"]))
            return True
        return False


def node_exit(host: str, value: dict[str, Any], ahead_s: float) -> NodeExit | NodeLost:
    """The agent's exit.json as an event; ``ahead_s`` moves the node's times to the controller's clock."""
    if value.get("lost"):
        return NodeLost(host=host, reason=value["reason"])
    errors = tuple(
        RankError(
            rank=error["rank"],
            unix_time=error["unix_time"] + ahead_s,
            message=error["message"],
            traceback=error["traceback"],
        )
        for error in value["errors"]
    )
    reason = "\n".join([value["reason"], *value["tail"]]) if value["code"] else value["reason"]
    return NodeExit(host=host, code=value["code"], reason=reason, errors=errors)
