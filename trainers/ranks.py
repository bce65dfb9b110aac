"""The warm parent of ranks: a process that imports torch once on a node and then forks for each launch of torchrun.

The node agent sends this source text to a new Python process (cluster/agent/running/warm.py), before it knows what is
to be launched. The agent requests a launch by a line of JSON (``Launch``) with descriptors for stdout and stderr. The
fork answers ``{"pid": …}``, waits for ``go``, and does torchrun's work; the parent sends ``{"exit": …}`` at the end.
The parent runs no code of a project itself, and never touches a GPU."""

# Runs before modules of the project can be imported, and without pathlib.
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
_GO_S = 60.0  # limit for each message of an agent


class Launch(NamedTuple):
    """A request of the agent: torchrun's command, environment and folder of the ranks, the mark of its processes."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    mark: str


def main() -> None:
    """Serve at a socket: ``NAME FIRST_IDLE_S IDLE_S ROOM``, idle limits at first and later, spaces for ``show_as``."""
    del sys.path[0]  # the folder of this text, /dev/fd
    name, first_s, idle_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGHUP):  # the end of a terminal must not end this process
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # another parent was faster
        return
    listener.listen(64)  # launches wait here while torch is imported
    gc.disable()  # imports make half a million objects that stay; without collections they take a fifth less time
    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # no later collection visits these objects, so the forks go on sharing their memory with this process
    gc.enable()
    serve(listener, first_s, idle_s)


def serve(listener: socket.socket, first_s: float, idle_s: float) -> None:
    """Fork for each launch, and report to each agent how its launch ended."""
    agents: dict[int, socket.socket] = {}  # process id of a fork → connection to its agent
    # the end of a child (SIGCHLD) writes into this pair, which wakes the select below
    wakeup_read, wakeup_write = socket.socketpair()
    wakeup_write.setblocking(False)
    signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    last_end_s, idle_limit_s = time.monotonic(), first_s
    while agents or time.monotonic() - last_end_s < idle_limit_s:
        ready, _, _ = select.select([listener, wakeup_read], [], [], 1.0)
        if wakeup_read in ready:
            wakeup_read.recv(4096)
        if listener in ready:
            # an agent that vanishes or sends nonsense must not end the parent, which others use
            with contextlib.suppress(OSError, TypeError, ValueError):
                pid, connection = _launch(listener)
                agents[pid], idle_limit_s = connection, idle_s
        for pid, code in _ended():
            last_end_s = time.monotonic()
            agent = agents.pop(pid, None)
            if agent is not None:
                with contextlib.suppress(OSError), agent:
                    agent.sendall(json.dumps({"exit": code}).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    """Return (process id, exit code) of each fork that has ended; a negative code is the signal that ended it."""
    ended = []
    with contextlib.suppress(ChildProcessError):  # there are no more children
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((waited[0], os.waitstatus_to_exitcode(waited[1])))
    return ended


def _launch(listener: socket.socket) -> tuple[int, socket.socket]:
    """Fork for the next launch; return its process id and the agent's connection. Raises as ``receive`` does."""
    connection, _ = listener.accept()
    connection.settimeout(_GO_S)
    # any user of this host can connect to an abstract socket
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
    """Let ps and nvidia-smi show this fork as ``words``, by overwriting the memory of the parent's arguments."""
    with contextlib.suppress(Exception):  # only a display: not worth an error
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # arg_start and arg_end of proc_pid_stat(5), counted behind the name, which may hold spaces
            begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        ctypes.memmove(begin, "\0".join(words).encode()[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def receive(connection: socket.socket) -> tuple[Launch, list[int]]:
    """Return a launch, and descriptors for stdout and stderr. Raises OSError, TypeError, ValueError: it is damaged."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise OSError("cut")
        data += more
    return Launch(**json.loads(data)), streams


def _become(launch: Launch, streams: list[int], connection: socket.socket) -> NoReturn:
    """Do the work of the launch in this fork, and end the process."""
    # a session, signals and a mark of its own, as if the agent had started a program
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.memfd_create(f"{MARKED}{launch.mark}")
    # nothing runs before the agent knows the process id: until then it may give up and start torchrun as a program
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    if connection.recv(3) != b"go\n":  # the agent is gone, or has given up the launch
        os._exit(0)
    connection.close()
    show_as(launch.argv)
    # stdin is empty, stdout and stderr are the agent's
    null = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([null, *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(launch.cwd)
    folders = [folder for folder in launch.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    # a module that this process has already imported would win over the run's own one: start torchrun as a program
    if shadowed(folders):
        os.execve(launch.argv[0], launch.argv, launch.env)
    _take_environment(launch.env, folders)
    os._exit(_run_torchrun(launch.argv))


def _take_environment(env: dict[str, str], folders: list[str]) -> None:
    """Do what the start of Python would do with these variables and with ``folders``, the entries of PYTHONPATH."""
    # keep the variables that imports have set, replace those of the parent's start
    set_by_imports = {name: value for name, value in os.environ.items() if name not in _env_at_start}
    os.environ.clear()
    os.environ.update({**set_by_imports, **env})
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
    except SystemExit as error:  # as Python reads its code: None is success, a text is an error
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
    return code


def shadowed(folders: list[str]) -> list[str]:
    """Return the paths of modules in ``folders`` that have the name of a module imported already. The site modules
    don't count: ``_take_environment`` imports them again.
    """
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
