"""Recorders in forks of a process that has imported mlflow, which costs each of them seconds of processor time.

`python forked_recorders.py ROOT ADDRESS` is that process. The interpreter that was to be a recorder (light_start.py)
asks it, stays for as long as the recorder, passes signals on and ends as it does; output, arguments, environment and
working directory are its own. A recorder is killed with it, and finds it for a parent that is gone when its own is.
"""

from __future__ import annotations

import contextlib
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

_IMPORTED = (
    "pipeline.tracking.recorder", "pipeline.tracking.mlflow_store", "pipeline.tracking.description",
    "mlflow.store.tracking.sqlalchemy_store", "mlflow.tracking.client", "mlflow.tracking._tracking_service.utils",
)  # fmt: skip
_VERBS = ("record", "serve")
_SERVER = os.getpid()
_set_by_imports: dict[str, str] = {}


def address(shared: Path) -> str:
    """Of the process that forks for this call of pytest, for those who see the same files, network and processes."""
    spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("mnt", "net", "pid")]
    return "-".join(map(str, ["/tmp/recorders", shared.stat().st_ino, *spaces]))


def stand_in() -> None:
    """Be the recorder that this interpreter was started for; returns where it has to import everything itself."""
    if sys.orig_argv[3:4] and sys.orig_argv[3] in _VERBS and "--tracker" not in sys.orig_argv:
        with contextlib.suppress(OSError, _OtherCodeError):
            _ask(sys.orig_argv[3:])


class _OtherCodeError(Exception):
    """The project's modules are to come from another checkout."""


def _ask(words: list[str]) -> None:
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(address(Path(sys.prefix).parent))
    root = asked.recv(4096).decode()
    if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != root:
        raise _OtherCodeError
    request = {"words": words, "env": dict(os.environ), "cwd": str(Path.cwd()), "proxy": os.getpid()}
    socket.send_fds(asked, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    pid = _number(asked)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a recorder ignores it
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the recorder alone holds them, and its reader sees its end
        os.dup2(null, number)
    code = _number(asked)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(asked: socket.socket) -> int:
    told = asked.recv(4)
    if not told:
        os._exit(70)
    return int.from_bytes(told, "big", signed=True)


def _serve(root: str, place: str) -> dict[str, Any] | None:
    """Fork for each connection, until stdin ends: None. In a forked process: the recorder that it is to become."""
    sys.path.insert(0, root)
    from pipeline.tracking import __main__ as recorder

    sys.modules.update(dict.fromkeys(recorder._NOT_NEEDED))  # type: ignore[arg-type]
    before = dict(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    _set_by_imports.update(item for item in os.environ.items() if before.get(item[0]) != item[1])
    del sys.modules[recorder.__name__]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for recorders
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        waited: list[socket.socket | int] = [listener, 0]
        try:
            while listener in select.select(waited, [], [])[0]:
                asked, _ = listener.accept()
                if os.fork() == 0:
                    asked.sendall(root.encode())
                    return _keep(asked)
                asked.close()
        finally:
            if os.getpid() == _SERVER:
                Path(place).unlink()
    return None


def _keep(asked: socket.socket) -> dict[str, Any]:
    """Fork the recorder, tell its process id, and how it has ended; its end is that of who asked. Returns in it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, outputs, _, _ = socket.recv_fds(asked, 1 << 16, 3)
    while message and not message.endswith(b"\n"):
        message += asked.recv(1 << 16)
    if not message:
        os._exit(0)
    request: dict[str, Any] = json.loads(message)
    pid = os.fork()
    if pid == 0:
        asked.close()
        return request | {"outputs": outputs}
    for held in (0, 1, 2, *outputs):
        os.close(held)
    asked.sendall(pid.to_bytes(4, "big", signed=True))
    ended = os.pidfd_open(pid)
    waited: list[socket.socket | int] = [asked, ended]
    if ended not in select.select(waited, [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        asked.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(words: list[str], env: dict[str, str], cwd: str, outputs: list[int], proxy: int) -> None:
    os.chdir(cwd)
    for number, held in enumerate(outputs):
        os.dup2(held, number)
        os.close(held)
    os.environ.clear()
    os.environ.update({**_set_by_imports, **env})
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.argv[:] = ["pipeline.tracking", *words]
    vars(os)["getppid"] = lambda: _parent_of(proxy)
    runpy.run_module("pipeline.tracking", run_name="__main__", alter_sys=True)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


if __name__ == "__main__":
    recorder = _serve(*sys.argv[1:])
    if recorder is not None:
        _become(**recorder)
