"""The agent on this computer that answers all requests of a start, and may be there before the launcher is.

Importing torch is most of a start, and the controller spends as long on composing and on the run's key: so ``begin`` is
called as soon as a training seems to be wanted, and the agent has torchrun prepared meanwhile (``agent/prepared.py``).
It ends with its stdin, and with it all that it has prepared: at the latest with this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from pipeline.cluster.agent.commands import START
from pipeline.cluster.launchers.answers import parse_answer
from pipeline.cluster.launchers.payload import BOOTSTRAP, opening, prepare
from pipeline.cluster.launchers.replies import Output
from pipeline.core import process

_PIPE_BYTES = 1 << 20  # Linux's limit for anybody; what is sent here is less
_CHUNK_BYTES = 1 << 16
_LOOK_S = 1.0
STOPPED = "was stopped (SIGSTOP)"
_begun: list[LocalAgent] = []


def argv(python: str) -> list[str]:
    """The command of an agent on this computer."""
    return [python, "-E", "-c", BOOTSTRAP]


def begin(*, of_script: bool) -> None:
    """Have torchrun prepared, unless it is already. Raises nothing: without it a start takes longer, no more."""
    if not _begun and sys.platform == "linux":
        with contextlib.suppress(Exception):
            _begun.append(LocalAgent(argv(sys.executable), of_script=of_script))


def forget() -> None:
    """Nothing will be started here for now: what was begun ends."""
    while (begun := _pop()) is not None:
        begun.close()


def _pop() -> LocalAgent | None:
    try:
        return _begun.pop()
    except IndexError:  # another trial may have taken it just now
        return None


def taken(command: Sequence[str], *, of_script: bool) -> LocalAgent:
    """The one that was begun, if it is of this command and can answer, else a new one. Raises PacelineError."""
    begun = _pop()
    if begun is not None and begun.argv == [*command] and begun.usable():
        return begun
    if begun is not None:
        begun.close()
    return LocalAgent(command, of_script=of_script)


class LocalAgent:
    """One Python that answers until its stdin ends."""

    def __init__(self, command: Sequence[str], *, of_script: bool) -> None:
        """Raises PacelineError."""
        self.argv = [*command]
        self._child = process.stream(command)
        assert self._child.stdin is not None
        self._stdin = self._child.stdin
        self._outputs = {stream.fileno(): bytearray() for stream in (self._child.stdout, self._child.stderr) if stream}
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # or writing would wait until Python has started
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._send(opening(START) + prepare({}, of_script=of_script))

    def ask(self, request: bytes, token: str, timeout_s: float) -> Output:
        """What it has written once it has answered, has ended or the time is up."""
        stdout, stderr = self._outputs
        self._send(request)
        until = time.monotonic() + timeout_s
        open_streams = {stdout, stderr}
        while open_streams and parse_answer(bytes(self._outputs[stdout]), token) is None:
            ready = select.select([*open_streams], [], [], min(_LOOK_S, max(0.0, until - time.monotonic())))[0]
            stopped = not ready and self._stopped()
            if stopped or time.monotonic() > until:
                self.close()
                why = STOPPED if stopped else f"was still running after {timeout_s:g} s"
                note = f"{self.argv[0]} (process {self._child.pid}) {why}"
                return Output(code=-signal.SIGSTOP if stopped else None, note=note)
            for stream in ready:
                data = os.read(stream, _CHUNK_BYTES)
                self._outputs[stream] += data
                if not data:
                    open_streams.discard(stream)
        told = bytes(self._outputs[stdout]), self._outputs[stderr].decode(errors="replace")
        return Output(stdout=told[0], stderr=told[1], code=0 if open_streams else self._child.wait())

    def usable(self) -> bool:
        """Whether it lives, and nobody has stopped it."""
        return self._child.poll() is None and not self._stopped()

    def _stopped(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it has said of its end is read instead
            self._stdin.write(data)
            self._stdin.flush()

    def close(self) -> None:
        """It ends, with what it has prepared for nothing."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
