"""Launches by a warm parent of ranks (trainers/ranks.py), which has imported torch already, else as a plain program.

It is found by an abstract socket, whose name follows from all that decides its environment.
"""

from __future__ import annotations

import contextlib
import fnmatch
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
from ..node import from_environment, sha256
from ..requests import WarmEnvironment
from ..wire import Json
from .processes import LINUX, process_state

IDLE_S = 30.0  # a parent ends if no launch comes for this time; restarts and further trials come sooner
FIRST_IDLE_S = 90.0  # the same before its first launch: preflight may run, and data may be sent
_ROOM = 1000  # spaces that a fork overwrites with the command that lists of processes show
_BIND_S = 5.0  # limit until a new parent accepts connections; Python takes a tenth of a second
_PID_S = 120.0  # limit until it has forked, because it may import torch from a slow disk first
_SET_AT_LAUNCH = (
    *("PACELINE_*", "PET_*", "GLOO_*", "NCCL_*", "PYTHONPATH"),
    "CUDA_VISIBLE_DEVICES",  # read at the first use of a device
    *("*_TOKEN", "*_API_KEY", "*_ACCESS_KEY", "*_ACCESS_KEY_ID", "*_SECRET", "*_PASSWORD"),
    *("AWS_*", "HF_*", "MLFLOW_*", "WANDB_*", "XDG_*", "KRB5*"),
)
"""Variables that neither Python's start nor an import of torch reads, so each launch sets its own. Torch reads names of
all kinds (CI, IS_FBCODE, USE_LIBUV), so all other variables identify the parent."""


def warm_up(env_passed: Sequence[str], known: WarmEnvironment) -> None:
    """Let a parent import torch while the host is still being checked. ``env_passed``: patterns of passed variables."""
    if not LINUX:
        return
    ranks = known.ranks_per_host
    threads = {"OMP_NUM_THREADS": str(max(1, count_cpus() // ranks))} if ranks else {}
    env = {**from_environment(env_passed), **threads, **known.env}
    name = _name(env)
    connection = _connected(name)
    if connection is None:
        _start(name, env, FIRST_IDLE_S)
    else:
        connection.close()


def _name(env: dict[str, str]) -> str:
    decides = {name: value for name, value in env.items() if not _is_set_at_launch(name)}
    text = json.dumps([sys.executable, os.getuid(), decides], sort_keys=True)
    return f"paceline-ranks-{sha256(text.encode())[:32]}"


def _is_set_at_launch(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SET_AT_LAUNCH)


def _start(name: str, env: dict[str, str], first_s: float) -> subprocess.Popen[bytes]:
    source, end = os.pipe()  # holds more than this text
    os.write(end, _ranks_source().encode())
    os.close(end)
    try:
        return subprocess.Popen(
            [sys.executable, f"/dev/fd/{source}", name, str(first_s), str(IDLE_S), " " * _ROOM],
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
    """Return a connection to the parent of that name; None: there is none, or it is another user's."""
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
    pid, user, group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


class Launch:
    """A torchrun forked by a warm parent, with Popen's methods; a plain process if the parent fails before the fork."""

    def __init__(self, connection: socket.socket, argv: list[str], env: dict[str, str], cwd: str, output: int) -> None:
        self._connection, self._cold = connection, (argv, env, cwd, os.dup(output))
        self._process: subprocess.Popen[bytes] | None = None
        self._received, self._forked, self._until = b"", False, time.monotonic() + _PID_S
        self.pid = _peer(connection)[0]  # the parent's, until it has forked
        self.returncode: int | None = None
        self.parent_ended = False  # while the fork ran
        connection.setblocking(False)

    def poll(self) -> int | None:
        if self._process is not None:
            self.returncode = self._process.poll()
        elif self.returncode is None:
            self._receive()
        return self.returncode

    def give_up(self) -> None:
        """Start nothing more; what was forked is ended by its mark."""
        if self._process is None and not self._forked and self.returncode is None:
            self._connection.close()
            self.returncode = -signal.SIGTERM

    def _receive(self) -> None:
        try:
            data = self._connection.recv(4096)
        except BlockingIOError:
            is_stopped = process_state(self.pid) == "T"  # by SIGSTOP
            if not self._forked and (time.monotonic() > self._until or is_stopped):
                self._start_cold()
            return
        except OSError:
            data = b""
        self._received += data
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._handle(json.loads(line))
        if not data and self.returncode is None:
            if self._forked:  # the parent was killed, so the fork's exit code stays unknown
                self.returncode, self.parent_ended = -signal.SIGKILL, True
            else:
                self._start_cold()

    def _handle(self, message: Json) -> None:
        if "pid" in message:
            self.pid, self._forked = int(message["pid"]), True
            with contextlib.suppress(OSError):
                self._connection.send(b"go\n")
        elif "exit" in message:
            self.returncode = int(message["exit"])
            self._connection.close()

    def _start_cold(self) -> None:
        self._connection.close()
        argv, env, cwd, output = self._cold
        self._process = begin(argv, env, cwd, output)
        self.pid = self._process.pid


Child = Union[Launch, "subprocess.Popen[bytes]"]
"""A started torchrun: forked by a warm parent, or a process of its own."""


def begin(argv: list[str], env: dict[str, str], cwd: str, output: int) -> subprocess.Popen[bytes]:
    """Start a program as torchrun is started without a parent. Raises OSError."""
    return subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def launch(argv: list[str], env: dict[str, str], cwd: str, output: int) -> Child:
    """Let a warm parent fork, an existing or a new one, else start the command itself. Raises OSError."""
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
    """Return a connection to the parent of that name, started if necessary. None: impossible."""
    connection = _connected(name)
    if connection is not None:
        return connection
    parent, until = _start(name, env, IDLE_S), time.monotonic() + _BIND_S
    while connection is None and parent.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
        connection = _connected(name)
    return connection
