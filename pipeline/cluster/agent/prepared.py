"""torchrun begun ahead: while the controller composes or asks the hosts, a process here imports what torchrun imports.

Importing torch takes a start longer than all else. The process that answers the requests of a start forks the later
supervisor at the first of them; that starts the Python which is to become torchrun (``torchrun``), and waits for
``start``. A script has a process of its own between supervisor and torchrun: then that one's place is held by a fork
of the supervisor, which becomes it by exec. All of them end with the process that answers, if it never starts, and
until they carry the run's mark with the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from typing import IO

from trainers.contract import variables

from . import torchrun
from .claims import Claim
from .probe import from_environment
from .processes import LINUX
from .torchrun import deserted, end_with_parent, receive, take, tell
from .wire import Json

_ROOM = 200  # of a mark
_waiting: list[socket.socket] = []  # to the later supervisor of this process


def prepare(request: Json) -> None:
    """Leave a process behind that waits for ``hand_over``, where that can pay: on Linux, with a second core."""
    if not LINUX or len(os.sched_getaffinity(0)) < 2:
        return
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            ours.close()
            os.setsid()
            if os.fork() == 0:
                wait_for_start(theirs, request)
        os._exit(0)
    theirs.close()
    os.waitpid(child, 0)
    _waiting.append(ours)


def hand_over(request: Json, node: Json, answer: int, claim: Claim | None) -> bool:
    """Let the process that waits supervise this run; False: there is none.

    Args:
        answer: the pipe in which it says whether torchrun has started.
    """
    told = {"request": request, "node": node, "claim": claim and [claim.wish, claim.ticket, claim.path]}
    for waiting in _waiting:
        with contextlib.suppress(OSError):
            tell(waiting, told, [answer, *([claim.descriptor] if claim else [])])
            return True
    return False


def wait_for_start(asked: socket.socket, request: Json) -> None:
    """The life of a supervisor, with that before its run."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP):  # as torchrun finds them when a supervisor starts it
        signal.signal(number, signal.SIG_IGN)
    child = Prepared(request)
    told, passed = receive(asked)
    if told is None:
        child.kill()
        return
    from .starting import supervise_forever

    held = told["claim"]
    claim = Claim(held[0], held[1], held[2], passed[1]) if held else None
    supervise_forever(told["request"], told["node"], passed[0], claim, child)


def program() -> bytes:
    """The text of ``torchrun``."""
    return str(torchrun.__spec__.loader.get_source(torchrun.__name__)).encode()  # type: ignore[union-attr]


class Prepared:
    """A child that will become what it is told, with the methods of Popen that a supervisor needs."""

    def __init__(self, request: Json) -> None:
        self._socket, theirs = socket.socketpair()
        self._env = {**from_environment(request["env_passed"]), **request["env"], variables.NODE: "-".ljust(_ROOM, "-")}
        self.returncode: int | None = None
        self._said, self._log = os.memfd_create("said"), -1
        fcntl.fcntl(self._said, fcntl.F_SETFL, os.O_APPEND)
        self._child = None if request["script"] else self._begin(theirs, leads=True)
        self.pid = self._child.pid if self._child else os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                self._socket.close()
                self._hold_place(theirs)
            os._exit(127)
        theirs.close()

    def _begin(self, stdin: socket.socket, *, leads: bool) -> subprocess.Popen[bytes]:
        """The Python that imports; ``leads`` a session of its own."""
        source, end = os.pipe()  # holds more than this text
        os.write(end, program())
        os.close(end)
        try:
            return subprocess.Popen(
                [sys.executable, f"/dev/fd/{source}", torchrun.FILE],
                env=self._env,
                stdin=stdin.fileno(),
                stdout=self._said,
                stderr=self._said,
                pass_fds=[source],
                start_new_session=leads,
            )
        finally:
            os.close(source)

    def _hold_place(self, asked: socket.socket) -> None:
        """Where a script's own process will be, with torchrun below it. Returns where it isn't needed."""
        end_with_parent(True)  # until it carries the run's mark: what is exec'd ends this
        os.setsid()
        ours, theirs = socket.socketpair()
        below = self._begin(theirs, leads=False)
        theirs.close()
        told, streams = receive(asked)
        if told is None or deserted(asked):
            below.kill()
            return
        take(streams)
        os.chdir(told["cwd"])
        os.set_inheritable(ours.fileno(), True)
        os.execve(told["argv"][0], told["argv"], {**told["env"], variables.TORCHRUN: f"{below.pid}:{ours.fileno()}"})

    def become(self, argv: list[str], env: dict[str, str], cwd: str, output: IO[bytes]) -> bool:
        """False: it can't, and is gone."""
        other = argv[0] != sys.executable or len(env.get(variables.NODE, "").encode()) > _ROOM
        if other or self.poll() is not None or self._stopped():
            self.kill()
            return False
        try:
            tell(self._socket, {"argv": argv, "env": env, "cwd": cwd}, [output.fileno(), output.fileno()])
        except OSError:
            self.kill()
            return False
        self._log = os.dup(output.fileno())
        return True

    def _stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP): the run would wait for it without end."""
        return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def poll(self) -> int | None:
        """Its exit code once it has ended (negative: the signal)."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            if pid and self._log >= 0:  # what ended the imports is there still
                with contextlib.suppress(OSError):
                    os.write(self._log, os.pread(self._said, os.fstat(self._said).st_size, 0))
        return self.returncode

    def kill(self) -> None:
        """End it before it has become anything; what waits below it ends with it."""
        self._socket.close()
        if self.poll() is None:
            for end in (os.killpg, os.kill):  # a fork that leads no group yet has nothing below it
                with contextlib.suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
