"""The warm parent of ranks: imports torch once on a node, before a launch is known, and then forks for each launch.

The node agent starts this text (cluster/agent/running/warm.py). A launch is a line of JSON (``Launch``) with
descriptors for stdout and stderr. The fork answers ``{"pid": …}``, waits for ``go``, and does torchrun's work; the
parent sends ``{"exit": …}`` at the end. It runs no code of a project itself, and never touches a GPU.
"""

# Runs before modules of the project can be imported.
# ruff: noqa: PTH110, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import NamedTuple, NoReturn

IMPORTS = ("torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.api")
MARKED = "paceline-node="
"""Name of a memory file that each process of a launch holds, followed by the launch's mark. The environment can't hold
the mark, because the system shows a fork with the environment of its parent."""
_SITE_MODULES = ("sitecustomize", "usercustomize")  # Python imports them from PYTHONPATH at each start
_GO_S = 60.0


class Launch(NamedTuple):
    """A request of the agent: a torchrun command, variables and folder of the ranks, and the mark of processes."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    mark: str


def main() -> None:
    """Run ``NAME FIRST_S IDLE_S ROOM``: name of the socket, idle limits at first and later, room for ``show_as``."""
    del sys.path[0]  # where this text came from
    name, first_s, idle_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGHUP):  # the end of a terminal must not end it
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # another parent was faster
        return
    listener.listen(64)  # launches wait here while torch is imported
    gc.disable()  # imports make half a million objects that stay; so they take a fifth less time
    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # no collection visits them, in the forks neither: they go on sharing this process's memory
    gc.enable()
    serve(listener, first_s, idle_s)


def serve(listener: socket.socket, first_s: float, idle_s: float) -> None:
    """Fork for each launch, and report to each agent how its launch ended."""
    launches: dict[int, socket.socket] = {}
    woken, wakes = socket.socketpair()  # an end of a child (SIGCHLD) wakes the select below
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    last_end_s, idle_limit_s = time.monotonic(), first_s
    while launches or time.monotonic() - last_end_s < idle_limit_s:
        ready, _, _ = select.select([listener, woken], [], [], 1.0)
        if woken in ready:
            woken.recv(4096)
        if listener in ready:
            with contextlib.suppress(OSError, TypeError, ValueError):
                pid, connection = _launch(listener)
                launches[pid], idle_limit_s = connection, idle_s
        for pid, code in _ended():
            last_end_s = time.monotonic()
            if (agent := launches.pop(pid, None)) is not None:
                with contextlib.suppress(OSError), agent:
                    agent.sendall(json.dumps({"exit": code}).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    """Return process ids and exit codes (negative: the signal) of the launches that have ended."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((waited[0], os.waitstatus_to_exitcode(waited[1])))
    return ended


def _launch(listener: socket.socket) -> tuple[int, socket.socket]:
    """Fork for the next launch; return its process id and the agent's connection. Raises as ``receive`` does."""
    connection, _ = listener.accept()
    connection.settimeout(_GO_S)
    uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if uid != os.getuid():
        connection.close()
        raise OSError("a launch of another user")
    launch, streams = receive(connection)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            listener.close()
            _become(launch, streams, connection)
        os._exit(1)
    for stream in streams:
        os.close(stream)
    return pid, connection


def show_as(words: list[str]) -> None:
    """Let ps and nvidia-smi show this fork as the command that it equals, in the room of the parent's own words."""
    with contextlib.suppress(Exception):  # not worth an error
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # arg_start and arg_end of proc_pid_stat(5), counted behind the name, which may hold spaces
            begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        ctypes.memmove(begin, "\0".join(words).encode()[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def receive(connection: socket.socket) -> tuple[Launch, list[int]]:
    """Return one launch and its two descriptors. Raises OSError, TypeError, ValueError: it is damaged."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise OSError("cut")
        data += more
    return Launch(**json.loads(data)), streams


def _become(launch: Launch, streams: list[int], connection: socket.socket) -> NoReturn:
    """Run this launch in the fork, to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.memfd_create(f"{MARKED}{launch.mark}")
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    if connection.recv(3) != b"go\n":  # the agent is gone, or doesn't want it any more
        os._exit(0)
    connection.close()
    show_as(launch.argv)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([null, *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(launch.cwd)
    folders = [folder for folder in launch.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if shadowed(folders):  # other modules than those that are imported already
        os.execve(launch.argv[0], launch.argv, launch.env)
    _take_environment(launch.env, folders)
    os._exit(_run_torchrun(launch.argv))


def _take_environment(env: dict[str, str], folders: list[str]) -> None:
    """Do what the start of Python does with these variables and the folders of PYTHONPATH."""
    # keep variables that imports have set, replace those of the parent's start
    imports_set = {name: value for name, value in os.environ.items() if name not in _env_at_start}
    os.environ.clear()
    os.environ.update({**imports_set, **env})
    sys.path[:0] = folders
    for name in _SITE_MODULES:
        if importlib.machinery.PathFinder.find_spec(name, folders) is not None:
            sys.modules.pop(name, None)
            importlib.import_module(name)


def _run_torchrun(argv: list[str]) -> int:
    """Run torchrun in this process; return its exit code."""
    code = 1
    try:
        sys.argv[:] = argv[1:]
        importlib.import_module("trainers.torchrun").main(show_as=show_as)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
    return code


def shadowed(folders: list[str]) -> list[str]:
    """Return the modules in these folders that would have been imported instead of ones that are imported already."""
    imported = {name for name in sys.modules if "." not in name and name not in ("__main__", *_SITE_MODULES)}
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder):
                path, name = os.path.join(folder, entry), entry.partition(".")[0]
                is_module = entry.endswith((".py", ".pyc", ".so")) or os.path.exists(os.path.join(path, "__init__.py"))
                if name in imported and is_module:
                    paths.append(path)
    return paths


_env_at_start = dict(os.environ)  # before imports that set variables

if __name__ == "__main__":
    main()
