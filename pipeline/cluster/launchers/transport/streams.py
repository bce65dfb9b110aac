"""Live streams from all nodes: one child process and two threads a node, which reconnect when a connection breaks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from subprocess import Popen
from typing import IO

from pipeline.cluster.agent.requests import ExamineOrder, Lines
from pipeline.cluster.events import Event, MetricsLine, NodeAnswers, NodeExit, NodeLost, NodeSilent
from pipeline.cluster.launchers.transport.answers import log_line, parse_stream
from pipeline.core.processes import process, threads
from pipeline.core.redact import hide
from trainers.contract.records import as_json


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to connect to a live agent."""

    host: str  # its label
    argv: list[str]  # the command of the agent there
    again: Callable[[], list[str]] | None = None  # of a further connection, after one broke or hung; None: the same
    slow_s: float = 0.0  # how long the connection may take until it answers, where that is longer than _SILENT_S
    silent_s: float = 0.0  # how long the agent may be silent at any time, where that is longer than _SILENT_S

    def retry(self) -> list[str]:
        """Return the command of a further connection."""
        return self.argv if self.again is None else self.again()


LOST_S = 5.0  # of silence: ssh notices after 3 to 4 s, then one try to reconnect begins
BEAT_S = 1.0
_SILENT_S = 4.0  # the agent sends something every second: a silent connection is replaced
_RETRY_S = 0.3
_RETRY_LATER_S = 1.0  # once the node was reported as silent
_AT_FIRST = 2  # times as slow right after the start, when a host also starts torchrun and its ranks


class Streams:
    """Follows every node of one attempt. ``emit`` is called from the reading threads.

    Args:
        opening: takes the byte offsets in log and metrics from which to continue, and returns the agent's input.
        metrics_at: bytes of metrics.jsonl that are here already.
        token: carried by the agents' answers, as ``opening`` tells them.
        lease_s: how long ranks of a silent node train on, and so how long reconnecting is tried; 0: not at all.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        opening: Callable[[int, int], bytes],
        emit: Callable[[Event], None],
        metrics_at: int,
        token: str,
        lease_s: float = 0.0,
    ) -> None:
        self.opening, self.emit, self.metrics_at, self.token, self.lease_s = opening, emit, metrics_at, token, lease_s
        self.closing, self._stopping, self._pruning = threading.Event(), threading.Event(), False
        self._streams = [_Stream(self, connection) for connection in connections]
        for stream in self._streams:
            threads.start(stream.read, name=f"follow {stream.label}", on_error=stream.failed)
        threads.start(self._beat, name="beats", on_error=self._beats_failed)

    def _beat(self) -> None:
        """Renew every node's lease each second. ``stop`` and ``prune`` are repeated, as a stream may have broken."""
        looked = time.monotonic()
        while not self.closing.is_set():
            word = b"prune\n" if self._pruning else b"beat\n"
            self._send_to_all(b"stop\n" if self._stopping.is_set() else word)
            now = time.monotonic()
            for stream in self._streams:  # capped, as this process may have been stopped itself
                stream.add_silence(min(now - looked, 2 * BEAT_S))
            looked = now
            if not self._stopping.wait(BEAT_S):
                continue
            self.closing.wait(BEAT_S / 2)

    def _beats_failed(self, why: str) -> None:
        for stream in self._streams:
            stream.failed(why)

    def _send_to_all(self, word: bytes) -> None:
        for stream in self._streams:
            stream.send(word)

    def prune(self) -> None:
        """Ask rank 0 to end the run, with a checkpoint, at the next end of an epoch."""
        self._pruning = True
        self._send_to_all(b"prune\n")

    def examine(self, order: ExamineOrder) -> None:
        """Let every node examine its ranks, or try to reach ``order.peers``; NodeExamination events follow."""
        self._send_to_all(b"examine " + json.dumps(as_json(order)).encode() + b"\n")

    def stop(self) -> None:
        """Ask every node that still answers to end its part. Returns at once; NodeExit events follow."""
        self._stopping.set()

    def close(self) -> None:
        """End the streams (not the training)."""
        self.closing.set()
        self._stopping.set()
        for stream in self._streams:
            stream.end()


class _Stream:
    def __init__(self, streams: Streams, connection: Connection) -> None:
        self._streams, self._emit, self._closing = streams, streams.emit, streams.closing
        self._connection, self._argv, self.label = connection, connection.argv, connection.host
        self._offsets = {"log": 0, "metrics": streams.metrics_at}
        self._child: Popen[bytes] | None = None
        self._opened = False  # the agent has read its request, and reads beats from here on
        self._answered = False  # on this connection
        self._ever_answered = False
        self._silence_reported = False
        self._silent_s = self._lost_s = 0.0  # silence of this connection, and of the node
        self._why_broken = ""

    def read(self) -> None:
        """Read until the node's end is known; reconnect where the stream breaks while its ranks may live."""
        while not self._closing.is_set():
            try:
                if self._follow():
                    return
            except Exception as error:  # another connection may work
                self._why_broken = threads.described(error)
            finally:
                self._hang_up()
            limit_s = max(LOST_S, _SILENT_S + self._slow_s, self._connection.silent_s)
            if self._lost_s > limit_s and (not self._ever_answered or self._lost_s > self._streams.lease_s):
                break
            if self._lost_s > limit_s and not self._silence_reported:
                self._silence_reported = True
                self._emit(NodeSilent(host=self.label, reason=self._silence))
            self._closing.wait(_RETRY_LATER_S if self._silence_reported else _RETRY_S)
            self._argv = self._connection.retry()
        if not self._closing.is_set():
            self._emit(NodeLost(host=self.label, reason=self._silence))

    @property
    def _silence(self) -> str:
        return f"no longer answers: {self._why_broken or 'the connection ended'}"

    @property
    def _slow_s(self) -> float:
        return self._connection.slow_s * (1 if self._ever_answered else _AT_FIRST)

    def failed(self, why: str) -> None:
        """Report the node as lost after an error in this process."""
        if not self._closing.is_set():
            self._emit(NodeLost(host=self.label, reason=f"can no longer be followed from here: {why}"))

    def _follow(self) -> bool:
        """Emit the events of one connection. True: the node has ended."""
        for line in self._lines():
            answer = parse_stream(line, self._streams.token, self.label, time.time())
            if answer is None:
                if line.strip() and not self._answered:
                    text = hide(line[:200].decode(errors="replace").strip())
                    self._why_broken = f"it says {text!r}, which is no answer"
                continue
            if not self._answered:
                self._answered = self._ever_answered = True
                self._why_broken = ""  # text of a login script doesn't explain a later end
            if isinstance(answer, Lines) and answer.start_bytes > self._offsets[answer.file]:
                return False  # lines are missing: the next connection brings them
            if self._silence_reported:
                self._silence_reported = False
                self._emit(NodeAnswers(host=self.label, silent_s=self._lost_s))
            self._silent_s = self._lost_s = 0.0
            if isinstance(answer, Lines):
                self._pass_on(answer)
            else:
                self._emit(answer)
            if isinstance(answer, NodeExit | NodeLost):
                return True
        return False

    def _pass_on(self, answer: Lines) -> None:
        if answer.start_bytes < self._offsets[answer.file] and answer.file == "log":
            cut = f"the log of this host was cut back to byte {answer.start_bytes} by somebody"
            self._emit(log_line(self.label, f"- | {cut}"))
        for text in answer.texts:
            self._emit(log_line(self.label, text) if answer.file == "log" else MetricsLine(text=text))
        self._offsets[answer.file] = answer.end_bytes

    def _lines(self) -> Iterator[bytes]:
        self._silent_s, self._opened, self._answered = 0.0, False, False
        child = self._child = process.stream(self._argv)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a stream has pipes")
        threads.start(self._read_stderr, child, name=f"stderr of {self.label}", on_error=self._note_failure)
        with contextlib.suppress(OSError):  # stderr says why it ended
            child.stdin.write(self._streams.opening(self._offsets["log"], self._offsets["metrics"]))
            child.stdin.flush()
            self._opened = True
        rest = b""
        while data := read_some(child, child.stdout):
            *whole, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest

    def _read_stderr(self, child: Popen[bytes]) -> None:
        if child.stderr is None:
            return
        with child.stderr as lines:  # closed here: whoever closes it elsewhere would wait for this reader's lock
            for line in lines:
                self._why_broken = line.decode(errors="replace").strip() or self._why_broken

    def _note_failure(self, why: str) -> None:
        self._why_broken = self._why_broken or why

    def add_silence(self, passed_s: float) -> None:
        """Add ``passed_s`` seconds of silence, and end a connection that has been silent for too long."""
        self._silent_s += passed_s
        self._lost_s += passed_s
        child = self._child
        limit_s = max(_SILENT_S, self._connection.silent_s)
        if not self._answered:
            limit_s = max(limit_s, self._slow_s)
        if self._silent_s > limit_s and child is not None:
            self._why_broken = self._why_broken or f"nothing was heard for {limit_s:.0f} s"
            child.kill()  # also ends one that is stopped

    def send(self, word: bytes) -> None:
        """Send a word unless the connection is stuck: waiting for one host must not let the others' leases end."""
        child = self._child
        if child is None or child.stdin is None or not self._opened:
            return
        with contextlib.suppress(OSError, ValueError):  # the reading thread notices a broken stream
            poll = select.poll()
            poll.register(child.stdin.fileno(), select.POLLOUT)
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                child.stdin.write(word)
                child.stdin.flush()

    def end(self) -> None:
        """End the connection; the reading thread notices."""
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()

    def _hang_up(self) -> None:
        child, self._child, self._opened = self._child, None, False
        if child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # the reason may still come on its stderr
            child.wait(timeout=0.5)
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def read_some(child: Popen[bytes], pipe: IO[bytes], silent_s: float = math.inf) -> bytes:
    """Return what a child has printed; nothing at the end of the pipe or of the child.

    A shared connection of ssh may keep the pipe open after the child has ended. Raises TimeoutError: nothing has come
    for ``silent_s``.
    """
    poll, waited_s = select.poll(), 0.0
    poll.register(pipe.fileno(), select.POLLIN)
    while waited_s < silent_s:  # counts polls, as time in which this process was stopped is no silence
        if poll.poll(_RETRY_S * 1000):
            return os.read(pipe.fileno(), 1 << 18)
        if child.poll() is not None:
            return b""
        waited_s += _RETRY_S
    raise TimeoutError(f"nothing came for {silent_s:g} s")
