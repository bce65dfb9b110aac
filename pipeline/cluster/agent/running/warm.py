"""Start torchrun as a fork of a warm parent, which saves the seconds that an import of torch takes.

A warm parent is a process (trainers/ranks.py) that has imported torch already and waits for commands. It listens at an
abstract socket, whose name is a digest of the parent's environment: only a start with the same environment finds it.
If no parent can serve a start, torchrun is started as an ordinary program.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Union

from trainers.contract import variables

from ..host.hardware import count_cpus
from ..node import from_environment
from ..requests import WarmEnvironment
from ..wire import Json
from .processes import LINUX, process_state

IDLE_S = 30.0  # a parent ends if no launch comes for this time; restarts and further trials come sooner
FIRST_IDLE_S = 90.0  # the same before its first launch: preflight may run, and data may be sent
_ROOM = 1000  # spaces in the parent's arguments, over which a fork writes its own command line, for ps
_BIND_S = 5.0  # limit until a new parent accepts connections; Python takes a tenth of a second
_PID_S = 120.0  # limit until the parent has forked, because it may import torch from a slow disk first
_SET_AT_LAUNCH = (
    *("PACELINE_*", "PET_*", "GLOO_*", "NCCL_*", "PYTHONPATH"),
    "CUDA_VISIBLE_DEVICES",  # read at the first use of a device
    *("*_TOKEN", "*_API_KEY", "*_ACCESS_KEY", "*_ACCESS_KEY_ID", "*_SECRET", "*_PASSWORD"),
    *("AWS_*", "HF_*", "MLFLOW_*", "WANDB_*", "XDG_*", "KRB5*"),
)
"""Variables that neither Python's start nor the import of torch reads, so a fork can set its own. All other variables
identify the parent, because torch reads names of all kinds while it is imported (CI, IS_FBCODE, USE_LIBUV)."""


def warm_up(env_passed: Sequence[str], warm: WarmEnvironment) -> None:
    """Let a parent import torch while the host is still being checked. ``env_passed``: patterns of passed variables."""
    if not LINUX:
        return
    # the same environment as the later start, or that won't find this parent
    ranks = warm.ranks_per_host
    threads = {"OMP_NUM_THREADS": str(max(1, count_cpus() // ranks))} if ranks else {}
    env = {**from_environment(env_passed), **threads, **warm.env}
    name = _name(env)
    connection = _connected(name)
    if connection is None:
        _start(name, env, FIRST_IDLE_S)
    else:
        connection.close()


def _name(env: dict[str, str]) -> str:
    """Return the name of the parent, and of its socket, for ranks with this environment."""
    identifying = {name: value for name, value in env.items() if not _is_set_at_launch(name)}
    text = json.dumps([sys.executable, os.getuid(), identifying], sort_keys=True)
    return f"paceline-ranks-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _is_set_at_launch(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SET_AT_LAUNCH)


def _start(name: str, env: dict[str, str], first_idle_s: float) -> subprocess.Popen[bytes]:
    """Start a parent. It reads its program from a pipe, so that no file has to be written to the host."""
    source, write_end = os.pipe()  # the pipe's buffer holds the whole text
    os.write(write_end, _ranks_source().encode())
    os.close(write_end)
    try:
        return subprocess.Popen(
            [sys.executable, f"/dev/fd/{source}", name, str(first_idle_s), str(IDLE_S), " " * _ROOM],
            env={**{key: value for key, value in env.items() if not _is_set_at_launch(key)}, variables.RANKS: name},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[source],
            start_new_session=True,
        )
    finally:
        os.close(source)


def _ranks_source() -> str:
    """Return the text of trainers/ranks.py, which travels with the agent."""
    return str(sys.modules[__name__].__spec__.loader.get_source("trainers.ranks"))  # type: ignore[union-attr]


def _connected(name: str) -> socket.socket | None:
    """Return a connection to the parent with this name; None: there is none, or it is another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        if _peer(connection)[1] == os.getuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group id of the process at the other end."""
    pid, user, group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


class Launch:
    """A torchrun that a warm parent forks, with Popen's ``poll``, ``pid`` and ``returncode``.

    The parent answers with lines of JSON: ``{"pid": …}`` when it has forked, and ``{"exit": …}`` when the fork has
    ended. If the parent fails before it has forked, torchrun is started as an ordinary program.
    """

    def __init__(self, connection: socket.socket, argv: list[str], env: dict[str, str], cwd: str, output: int) -> None:
        self._connection, self._command = connection, (argv, env, cwd, os.dup(output))
        self._process: subprocess.Popen[bytes] | None = None  # the ordinary program, if the parent failed
        self._received, self._forked, self._until = b"", False, time.monotonic() + _PID_S
        self.pid = _peer(connection)[0]  # the parent's, until it has forked
        self.returncode: int | None = None
        self.parent_ended = False  # the parent ended before it had reported the fork's exit code
        connection.setblocking(False)

    def poll(self) -> int | None:
        if self._process is not None:
            self.returncode = self._process.poll()
        elif self.returncode is None:
            self._receive()
        return self.returncode

    def give_up(self) -> None:
        """Keep the parent from forking. A fork that exists already is ended elsewhere, by its mark."""
        if self._process is None and not self._forked and self.returncode is None:
            self._connection.close()
            self.returncode = -signal.SIGTERM

    def _receive(self) -> None:
        try:
            data = self._connection.recv(4096)
        except BlockingIOError:
            is_stopped = process_state(self.pid) == "T"  # by SIGSTOP
            if not self._forked and (time.monotonic() > self._until or is_stopped):
                self._start_program()
            return
        except OSError:
            data = b""
        self._received += data
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._handle(json.loads(line))
        if not data and self.returncode is None:  # the parent has closed the connection: it has ended
            if self._forked:  # then nobody knows the fork's exit code
                self.returncode, self.parent_ended = -signal.SIGKILL, True
            else:
                self._start_program()

    def _handle(self, message: Json) -> None:
        if "pid" in message:
            self.pid, self._forked = int(message["pid"]), True
            with contextlib.suppress(OSError):
                self._connection.send(b"go\n")  # the fork waits until this process knows its id
        elif "exit" in message:
            self.returncode = int(message["exit"])
            self._connection.close()

    def _start_program(self) -> None:
        self._connection.close()
        argv, env, cwd, output = self._command
        self._process = begin(argv, env, cwd, output)
        self.pid = self._process.pid


Child = Union[Launch, "subprocess.Popen[bytes]"]
"""A started torchrun: forked by a warm parent, or a process of its own."""


def begin(argv: list[str], env: dict[str, str], cwd: str, output: int) -> subprocess.Popen[bytes]:
    """Start a program without a warm parent. Raises OSError."""
    return subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def launch(argv: list[str], env: dict[str, str], cwd: str, output: int) -> Child:
    """Let a warm parent, an existing or a new one, fork for the command; else start the command. Raises OSError."""
    # a parent runs the same interpreter as this agent, so another one can't be served
    connection = _connected_or_started(_name(env), env) if LINUX and argv[0] == sys.executable else None
    if connection is not None:
        order = json.dumps({"argv": argv, "env": env, "cwd": cwd, "mark": env[variables.NODE]}).encode() + b"\n"
        try:
            sent = socket.send_fds(connection, [order], [output, output])
            connection.sendall(order[sent:])
        except OSError:
            connection.close()
        else:
            return Launch(connection, argv, env, cwd, output)
    return begin(argv, env, cwd, output)


def _connected_or_started(name: str, env: dict[str, str]) -> socket.socket | None:
    """Return a connection to the parent of that name, started if necessary; None if that fails."""
    connection = _connected(name)
    if connection is not None:
        return connection
    parent, until = _start(name, env, IDLE_S), time.monotonic() + _BIND_S
    while connection is None and parent.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
        connection = _connected(name)
    return connection
