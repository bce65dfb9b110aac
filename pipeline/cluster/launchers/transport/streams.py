"""Live streams from all nodes of an attempt: what the agents report becomes events on the controller.

Each node has a connection of its own: a child process such as ssh, and two threads that read from it. When a connection
breaks, they reconnect and continue at the byte where they were, so that no line is lost. In the other direction a beat
each second renews the node's lease: the time without a beat after which a node ends its ranks by itself.
"""

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
    argv: list[str]  # the command that starts the agent there
    again: Callable[[], list[str]] | None = None  # returns the command after a connection broke or hung; None: argv
    slow_s: float = 0.0  # how long the connection may take until it answers, if that is longer than _SILENT_S
    silent_s: float = 0.0  # how long the agent may be silent at any time, if that is longer than _SILENT_S

    def retry(self) -> list[str]:
        """Return the command of a further connection."""
        return self.argv if self.again is None else self.again()


LOST_S = 5.0  # silence after which a node counts as lost: ssh notices after 3 to 4 s, then one try to reconnect begins
BEAT_S = 1.0
_SILENT_S = 4.0  # the agent sends something every second: a connection that is silent for longer is replaced
_RETRY_S = 0.3
_RETRY_LATER_S = 1.0  # between two tries after the node was reported as silent
_AT_FIRST = 2  # factor of slow_s right after the start, when a host also starts torchrun and its ranks


class Streams:
    """Follows every node of one attempt. ``emit`` is called from the reading threads.

    Args:
        opening: takes the byte offsets in log and metrics from which to continue, and returns the agent's input.
        metrics_at: bytes of metrics.jsonl that are here already.
        token: what each line of the agents contains, as in the input that ``opening`` returns.
        lease_s: how long the ranks of a silent node still train, and so how long reconnecting is tried; 0: not at all.
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
        threads.start(self._send_beats, name="beats", on_error=self._beats_failed)

    def _send_beats(self) -> None:
        """Renew every node's lease each second. ``stop`` and ``prune`` are repeated, as a stream may have broken."""
        last_beat = time.monotonic()
        while not self.closing.is_set():
            word = b"prune\n" if self._pruning else b"beat\n"
            self._send_to_all(b"stop\n" if self._stopping.is_set() else word)
            now = time.monotonic()
            for stream in self._streams:
                # a longer time is no silence of the node: this process was stopped meanwhile (Ctrl-Z)
                stream.add_silence(min(now - last_beat, 2 * BEAT_S))
            last_beat = now
            if not self._stopping.wait(BEAT_S):
                continue
            self.closing.wait(BEAT_S / 2)  # _stopping.wait returns at once now

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
        """Let every node examine its ranks, or try to reach ``order.peers``; NodeExamination events will follow."""
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
    """The stream from one node, over one connection after the other."""

    def __init__(self, streams: Streams, connection: Connection) -> None:
        self._streams, self._emit, self._closing = streams, streams.emit, streams.closing
        self._connection, self._argv, self.label = connection, connection.argv, connection.host
        self._offsets = {"log": 0, "metrics": streams.metrics_at}  # file of the node → bytes that were emitted
        self._child: Popen[bytes] | None = None
        self._opened = False  # the request was sent, and the agent reads beats from here on
        self._answered = False  # on this connection
        self._ever_answered = False
        self._silence_reported = False
        self._silent_s = self._lost_s = 0.0  # how long this connection has been silent; how long the node has
        self._why_broken = ""

    def read(self) -> None:
        """Read until the node's end is known; reconnect if the stream breaks while its ranks may live."""
        while not self._closing.is_set():
            try:
                if self._read_connection():
                    return
            except Exception as error:  # another connection may work
                self._why_broken = threads.described(error)
            finally:
                self._hang_up()
            limit_s = max(LOST_S, _SILENT_S + self._slow_s, self._connection.silent_s)
            if self._lost_s > limit_s:
                # it never answered, or its ranks have ended with the lease: nothing to wait for
                if not self._ever_answered or self._lost_s > self._streams.lease_s:
                    break
                if not self._silence_reported:
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

    def _read_connection(self) -> bool:
        """Emit the events of one connection. Returns True if the node has ended."""
        for line in self._lines():
            answer = parse_stream(line, self._streams.token, self.label, time.time())
            if answer is None:
                if line.strip() and not self._answered:  # a login that prints an error instead of starting the agent
                    text = hide(line[:200].decode(errors="replace").strip())
                    self._why_broken = f"it says {text!r}, which is no answer"
                continue
            if not self._answered:
                self._answered = self._ever_answered = True
                self._why_broken = ""  # what a login has printed doesn't explain a later end
            if isinstance(answer, Lines) and answer.start_bytes > self._offsets[answer.file]:
                return False  # lines are missing: the next connection brings them
            if self._silence_reported:
                self._silence_reported = False
                self._emit(NodeAnswers(host=self.label, silent_s=self._lost_s))
            self._silent_s = self._lost_s = 0.0
            if isinstance(answer, Lines):
                self._emit_lines(answer)
            else:
                self._emit(answer)
            if isinstance(answer, NodeExit | NodeLost):
                return True
        return False

    def _emit_lines(self, answer: Lines) -> None:
        if answer.start_bytes < self._offsets[answer.file] and answer.file == "log":
            cut = f"the log of this host was cut back to byte {answer.start_bytes} by somebody"
            self._emit(log_line(self.label, f"- | {cut}"))
        for text in answer.texts:
            self._emit(log_line(self.label, text) if answer.file == "log" else MetricsLine(text=text))
        self._offsets[answer.file] = answer.end_bytes

    def _lines(self) -> Iterator[bytes]:
        """Open a connection and yield its lines; the last one may lack its end."""
        self._silent_s, self._opened, self._answered = 0.0, False, False
        child = self._child = process.stream(self._argv)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a stream has pipes")
        threads.start(self._read_stderr, child, name=f"stderr of {self.label}", on_error=self._note_failure)
        with contextlib.suppress(OSError):  # the child has ended, and its stderr explains why
            child.stdin.write(self._streams.opening(self._offsets["log"], self._offsets["metrics"]))
            child.stdin.flush()
            self._opened = True
        rest = b""
        while data := read_some(child, child.stdout):
            *complete, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in complete)
        if rest:
            yield rest

    def _read_stderr(self, child: Popen[bytes]) -> None:
        if child.stderr is None:
            return
        with child.stderr as lines:  # closed by this thread: in another one close() would wait for this read to end
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
        """End the child of the connection, if there is one."""
        child, self._child, self._opened = self._child, None, False
        if child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stderr may still explain why it ended
            child.wait(timeout=0.5)
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def read_some(child: Popen[bytes], pipe: IO[bytes], silent_s: float = math.inf) -> bytes:
    """Return what a child has printed; nothing at its end. Raises TimeoutError: nothing has come for ``silent_s``."""
    poll, waited_s = select.poll(), 0.0
    poll.register(pipe.fileno(), select.POLLIN)
    while waited_s < silent_s:  # counts polls: time in which this process was stopped (Ctrl-Z) is no silence
        if poll.poll(_RETRY_S * 1000):
            return os.read(pipe.fileno(), 1 << 18)
        if child.poll() is not None:  # the background process of a shared ssh connection may keep the pipe open
            return b""
        waited_s += _RETRY_S
    raise TimeoutError(f"nothing came for {silent_s:g} s")
