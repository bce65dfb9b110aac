"""Live streams from all nodes: one child and two threads a node, reconnecting where a connection breaks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from subprocess import Popen
from typing import IO

from pipeline.cluster.launchers.transport.answers import Lines, log_line, parse_stream
from pipeline.core.processes import process, threads
from pipeline.core.redact import hide
from pipeline.core.specs import Event, MetricsLine, NodeAnswers, NodeLost, NodeSilent
from trainers.contract.beats import NodeBeat, NodeLook


@dataclass(frozen=True, kw_only=True)
class Connection:
    """``host`` is its label, ``argv`` the command of a live agent there. ``again`` makes the command of a further
    connection, after one broke or hung (None: the same). ``slow_s`` is how long the connection may
    take until it answers, ``silent_s`` how long the agent may say nothing at any time: more than the usual limits."""

    host: str
    argv: list[str]
    again: Callable[[], list[str]] | None = None
    slow_s: float = 0.0
    silent_s: float = 0.0

    def retry(self) -> list[str]:
        """The command of a further connection."""
        return self.argv if self.again is None else self.again()


LOST_S = 5.0  # of silence: ssh notices after 3 to 4, one try to reconnect begins, others are down within 10
BEAT_S = 1.0
_SILENT_S = 4.0  # the agent says something every second: a connection that doesn't is made anew
_RETRY_S = 0.3
_RETRY_LATER_S = 1.0  # once it has been said that the node is silent
_AT_FIRST = 2  # times as slow: right after the start a host has torchrun and its ranks to begin as well


class Streams:
    """Follows every node of one attempt. ``emit`` is called from the reading threads.

    Args:
        opening: byte offsets to go on from → what the agent reads first.
        metrics_at: bytes of metrics.jsonl that are here already.
        token: what the agents' answers carry, as ``opening`` tells them.
        lease_s: for how long ranks of a node that is silent train on; until then it is tried again. 0: it counts as
            lost.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        opening: Callable[[dict[str, int]], bytes],
        emit: Callable[[Event], None],
        metrics_at: int,
        token: str,
        lease_s: float = 0.0,
    ) -> None:
        self._stopping = threading.Event()
        self._pruning = False
        self._closing = threading.Event()
        self._emit = emit
        self._streams = [
            _Stream(item, opening, emit, self._closing, metrics_at, token, lease_s) for item in connections
        ]
        for stream in self._streams:
            threads.start(stream.read, name=f"follow {stream.label}", on_error=stream.failed)
        threads.start(self._beat, name="beats", on_error=self._beats_failed)

    def _beat(self) -> None:
        """Renew every node's lease each second; ``stop`` and ``prune`` are repeated, as a stream may have broken."""
        looked = time.monotonic()
        while not self._closing.is_set():
            word = b"prune\n" if self._pruning else b"beat\n"
            self._tell(b"stop\n" if self._stopping.is_set() else word)
            now = time.monotonic()
            for stream in self._streams:  # time in which this process was stopped itself is nobody's silence
                stream.listened(min(now - looked, 2 * BEAT_S))
            looked = now
            if not self._stopping.wait(BEAT_S):
                continue
            self._closing.wait(BEAT_S / 2)

    def _beats_failed(self, why: str) -> None:
        for stream in self._streams:
            stream.failed(why)

    def _tell(self, word: bytes) -> None:
        for stream in self._streams:
            stream.tell(word)

    def prune(self) -> None:
        """Ask rank 0 to end the run, with a checkpoint, at the next end of an epoch."""
        self._pruning = True
        self._tell(b"prune\n")

    def look(self, peers: Sequence[tuple[str, int]] | None = ()) -> None:
        """Ask every node how its ranks are (None: without their stacks), or only whether the ssh servers ``peers``
        answer it; NodeLook events follow."""
        self._tell(b"look " + json.dumps(peers).encode() + b"\n")

    def stop(self) -> None:
        """Ask every node that still answers to end its part; returns at once, NodeExit events follow."""
        self._stopping.set()

    def close(self) -> None:
        """End the streams (not the training)."""
        self._closing.set()
        self._stopping.set()
        for stream in self._streams:
            stream.end()


class _Stream:
    def __init__(
        self,
        connection: Connection,
        opening: Callable[[dict[str, int]], bytes],
        emit: Callable[[Event], None],
        closing: threading.Event,
        metrics_at: int,
        token: str,
        lease_s: float,
    ) -> None:
        self._lease_s = lease_s
        self._connection, self._argv, self.label = connection, connection.argv, connection.host
        self._opening, self._emit, self._closing, self._token = opening, emit, closing, token
        self._offsets = {"log": 0, "metrics": metrics_at}
        self._child: Popen[bytes] | None = None
        self._opened = False  # the agent has been told what to follow: from here on it reads beats
        self._answered = False  # on this connection
        self._ever_answered = False
        self._silence_reported = False
        self._silent_s = self._lost_s = 0.0  # since the last answer, of this connection and of the node
        self._said = ""

    def read(self) -> None:
        """Until the node's end is known: read, and reconnect where the stream breaks while its ranks may live."""
        while not self._closing.is_set():
            try:
                if self._follow():
                    return
            except Exception as error:  # whatever it is, another connection may do better
                self._said = threads.described(error)
            finally:
                self._hang_up()
            limit_s = max(LOST_S, _SILENT_S + self._slow_s, self._connection.silent_s)
            if self._lost_s > limit_s and (not self._ever_answered or self._lost_s > self._lease_s):
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
        return f"no longer answers: {self._said or 'the connection ended'}"

    @property
    def _slow_s(self) -> float:
        """How long a connection may take until it answers."""
        return self._connection.slow_s * (1 if self._ever_answered else _AT_FIRST)

    def failed(self, why: str) -> None:
        """Something in this process went wrong, so nothing more will be heard of the node."""
        if not self._closing.is_set():
            self._emit(NodeLost(host=self.label, reason=f"can no longer be followed from here: {why}"))

    def _follow(self) -> bool:
        """Pass on what one connection brings. True: the node has ended."""
        for line in self._lines():
            answer = parse_stream(line, self._token, self.label, time.time())
            if answer is None:
                if line.strip() and not self._answered:
                    self._said = f"it says {hide(line[:200].decode(errors='replace').strip())!r}, which is no answer"
                continue
            if not self._answered:
                self._answered = self._ever_answered = True
                self._said = ""  # what a login script has printed before says nothing of an end
            if isinstance(answer, Lines) and answer.start_bytes > self._offsets[answer.of]:
                return False  # what stood between got lost: the next connection brings it
            if self._silence_reported:
                self._silence_reported = False
                self._emit(NodeAnswers(host=self.label, silent_s=self._lost_s))
            self._silent_s = self._lost_s = 0.0
            if isinstance(answer, Lines):
                self._pass_on(answer)
                continue
            self._emit(answer)
            if not isinstance(answer, NodeBeat | NodeLook):
                return True
        return False

    def _pass_on(self, answer: Lines) -> None:
        if answer.start_bytes < self._offsets[answer.of] and answer.of == "log":
            cut = f"the log of this host was cut back to byte {answer.start_bytes} by somebody"
            self._emit(log_line(self.label, f"- | {cut}"))
        for text in answer.texts:
            self._emit(log_line(self.label, text) if answer.of == "log" else MetricsLine(text=text))
        self._offsets[answer.of] = answer.end_bytes

    def _lines(self) -> Iterator[bytes]:
        """The lines of one connection; the last one may be cut."""
        self._silent_s, self._opened, self._answered = 0.0, False, False
        child = self._child = process.stream(self._argv)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a stream has pipes")
        threads.start(self._listen, child, name=f"stderr of {self.label}", on_error=self._note)
        with contextlib.suppress(OSError):  # why it ended stands on its stderr
            child.stdin.write(self._opening({f"{name}_at": at for name, at in self._offsets.items()}))
            child.stdin.flush()
            self._opened = True
        yield from _lines_of(child, child.stdout)

    def _listen(self, child: Popen[bytes]) -> None:
        """Keep the last line of stderr: it says why a connection ended."""
        if child.stderr is not None:
            for line in child.stderr:
                self._said = line.decode(errors="replace").strip() or self._said

    def _note(self, why: str) -> None:
        self._said = self._said or why

    def listened(self, passed_s: float) -> None:
        """``passed_s`` more seconds without an answer, unless one comes; a connection that says nothing is ended."""
        self._silent_s += passed_s
        self._lost_s += passed_s
        child = self._child
        limit_s = max(_SILENT_S, self._connection.silent_s)
        if not self._answered:
            limit_s = max(limit_s, self._slow_s)
        if self._silent_s > limit_s and child is not None:
            self._said = self._said or f"nothing was heard for {limit_s:.0f} s"
            child.kill()  # also ends one that is stopped

    def tell(self, word: bytes) -> None:
        """Send a word unless the connection is stuck: waiting for one host must not let the others' leases end."""
        child = self._child
        if child is None or child.stdin is None or not self._opened:
            return
        with contextlib.suppress(OSError, ValueError):  # a broken stream shows at its reading end
            poll = select.poll()
            poll.register(child.stdin.fileno(), select.POLLOUT)
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                child.stdin.write(word)
                child.stdin.flush()

    def end(self) -> None:
        """End the connection; the thread that reads it notices."""
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()

    def _hang_up(self) -> None:
        """End the child and close its pipes, in whatever state the connection is."""
        child, self._child, self._opened = self._child, None, False
        if child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # how it ended by itself may stand on its stderr
            child.wait(timeout=0.5)
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _lines_of(child: Popen[bytes], pipe: IO[bytes]) -> Iterator[bytes]:
    """Lines until the pipe's end, or until the child is gone: what it shared its pipes with (ssh gives them to the
    process that holds a shared connection) may hold them open for ever."""
    rest, poll = b"", select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while True:
        if poll.poll(_RETRY_S * 1000):
            data = os.read(pipe.fileno(), 1 << 18)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in whole)
        elif child.poll() is not None:
            break
    if rest:
        yield rest
