"""Ranks in forks of a process that has imported torch: importing it costs each of them two seconds of processor time.

`python forked_ranks.py MODULE...` is that process, with these modules imported; the stand-in for torchrun and
tests/trainers/ranks.py ask it. A rank finds what it would find in an interpreter of its own: arguments, environment,
working directory, import path, output and session. But /proc tells the command line and the environment of the process
that forked it, so no test that looks for ranks has them forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any


class ForkedRank:
    """Of subprocess.Popen what the stand-in for torchrun uses. Raises OSError where nobody forks."""

    def __init__(self, argv: list[str], env: dict[str, str], out: str, err: str, prefix: str = sys.prefix) -> None:
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.connect(address(prefix))
        request = {"argv": argv, "env": env, "cwd": str(Path.cwd()), "outputs": [out, err]}
        self._asked.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._answer()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._asked], [], [], 0)[0]:
            self.returncode = self._answer()
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _answer(self) -> int:
        return int.from_bytes(self._asked.recv(4), "big", signed=True)


def can_fork(argv: list[str], env: dict[str, str]) -> bool:
    """Whether such a rank may be one. Where it reads what an interpreter reads at its start, it has its own."""
    places = [Path(folder, "sitecustomize.py") for folder in env.get("PYTHONPATH", "").split(os.pathsep)]
    plain = env.get("OMP_NUM_THREADS") == "1" and not any(place.exists() for place in places)
    is_ours = argv[:1] == ["-m"] and argv[1] in ("trainers.classifier", "trainers.measuring.measure")
    return plain and is_ours and Path(address()).exists()


def address(prefix: str = sys.prefix) -> str:
    """Of the process that forks, whose interpreter has this prefix, for those who see the same files, network and
    processes. Short, as it has to be."""
    spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("mnt", "net", "pid")]
    return "-".join(map(str, ["/tmp/ranks", Path(prefix).stat().st_ino, *spaces]))


def _serve() -> dict[str, Any] | None:
    """Fork for each connection, until stdin ends: None. In a forked process: the rank that it is to become."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for ranks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address())
        listener.listen()
        waited: list[socket.socket | int] = [listener, 0]
        try:
            while listener in select.select(waited, [], [])[0]:
                asked, _ = listener.accept()
                if os.fork() == 0:
                    return _keep(asked)
                asked.close()
        finally:
            if os.getpid() == _SERVER:
                Path(address()).unlink()
    return None


def _keep(asked: socket.socket) -> dict[str, Any]:
    """Fork the rank, tell its process id, and how it has ended. Returns in the rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request: dict[str, Any] = json.loads(asked.makefile().readline())
    pid = os.fork()
    if pid == 0:
        asked.close()
        return request
    for told in (lambda: pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])):
        asked.sendall(told().to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(argv: list[str], env: dict[str, str], cwd: str, outputs: list[str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.orig_argv[1:] = ["-u", *argv]
    sys.argv[1:] = argv[2:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


_SERVER = os.getpid()

if __name__ == "__main__":
    rank = _serve()
    if rank is not None:
        _become(**rank)
