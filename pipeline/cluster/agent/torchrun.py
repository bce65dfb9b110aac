"""A Python that imports what torchrun imports while nobody knows yet what torchrun is to run, then becomes it.

``prepared`` starts this text as a program of its own, with the agent's interpreter. Its stdin is a socket: one line of
JSON says what it becomes, the end of it that it isn't needed. Its stderr is a file without a name: what the imports say
is handed on to torchrun's log, or is left to its parent where they ended it. Where anything was not to be foreseen
(another interpreter or program, variables that its imports may have read, modules of the run in front of those that it
has imported, an import that failed), it becomes the same command by exec, as if nothing had been prepared. It never
outlives who started it without the run's mark, by which what is left of a run is found and ended: until it carries
that, the system ends it with its parent. Standard library only, Python >= 3.9.
"""

# Much of this is file descriptors and a search path as text: os.path all the way.
# ruff: noqa: PTH110, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILE = "trainers/torchrun.py"
"""Of a snapshot: what it becomes, by its path; also how a list of processes shows it."""

IMPORTS = ("torch.distributed.launcher.api", "torch.distributed.elastic.agent.server.local_elastic_agent")
OF_RANKS = (
    *("PACELINE_*", "PET_*", "GLOO_*", "NCCL_*", "OMP_NUM_THREADS", "PYTHONPATH"),
    "CUDA_VISIBLE_DEVICES",  # read when the first device is asked for
    *("*_TOKEN", "*_API_KEY", "*_ACCESS_KEY", "*_ACCESS_KEY_ID", "*_SECRET", "*_PASSWORD"),
    *("AWS_*", "HF_*", "MLFLOW_*", "WANDB_*"),
)
"""Variables that neither Python's start nor these imports read for anything that torchrun does: ranks get them. Torch
reads names of all kinds (CI, IS_FBCODE, USE_LIBUV), so only those pass of which it is known."""
MARK = "PACELINE_NODE"
_OF_SITE = ("sitecustomize", "usercustomize")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Import, wait, become. Nothing of the folder where it runs is imported."""
    del sys.path[0]  # where this text came from
    end_with_parent(True)
    given, begun_with, imported = environment(), dict(os.environ), False
    with contextlib.suppress(Exception):
        for name in IMPORTS:
            __import__(name)
        imported = True
    waiting = socket.socket(fileno=os.dup(0))
    told, streams = receive(waiting)
    if told is None:
        os._exit(0)
    argv, env = told["argv"], told["env"]
    marked = carry_mark(env.get(MARK, ""))
    if marked:
        end_with_parent(False)
    if deserted(waiting):  # asked last: whoever dies after this leaves a process with the mark
        os._exit(0)
    waiting.close()
    said = os.dup(2)  # a file
    take(streams)
    os.chdir(told["cwd"])
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    known = argv[0] == sys.executable and argv[1].endswith(f"/{FILE}")
    foreseen = imported and known and not differing(given, begun_with, env)
    if not foreseen or not marked or shadowed(entries):
        os.ftruncate(said, 0)  # it is said again
        os.execve(argv[0], argv, env)
    os.write(2, os.pread(said, os.fstat(said).st_size, 0))
    os.ftruncate(said, 0)
    os.close(said)
    added = {name: value for name, value in os.environ.items() if name not in given}  # by Python's start, by an import
    os.environ.clear()
    os.environ.update({**added, **env})
    sys.path[:0] = entries
    run(argv[1:], entries)


def environment() -> dict[str, str]:
    """What this process was started with, as the system shows it."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [variable.partition(b"=") for variable in file.read().split(b"\0") if variable]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def tell(waiting: socket.socket, told: dict[str, Any], streams: list[int]) -> None:
    """What ``receive`` returns at the other end. Raises OSError: nobody is there."""
    data = json.dumps(told).encode() + b"\n"
    sent = socket.send_fds(waiting, [data], streams)
    if sent < len(data):  # who has read all may have closed its end by now
        waiting.sendall(data[sent:])


def receive(waiting: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One line of JSON, and the descriptors that came with it; None: the other end was closed instead."""
    data, streams, _, _ = socket.recv_fds(waiting, 1 << 16, 2)
    while data and not data.endswith(b"\n"):
        more = waiting.recv(1 << 16)
        if not more:
            return None, []
        data += more
    for stream in streams:
        os.set_inheritable(stream, False)
    return (json.loads(data) if data else None), streams


def end_with_parent(wanted: bool) -> None:
    """Whether the system kills this process when its parent dies; an exec keeps that."""
    with contextlib.suppress(Exception):  # then ``deserted`` alone ends it, later
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL) if wanted else 0, 0, 0, 0)


def deserted(waiting: socket.socket) -> bool:
    """Whether the other end is closed: who holds it is dead."""
    try:
        return not waiting.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def take(streams: list[int]) -> None:
    """Stdin is empty from here on; stdout and stderr are these."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([null, *streams]):
        os.dup2(stream, number)
        os.close(stream)


def differing(given: dict[str, str], begun_with: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """The variables that were not foreseen, among those that the imports may have read.

    Args:
        given: those that this process was started with.
        begun_with: the same with what Python's start has set: another Python's start has set it in ``wanted``, too.
    """
    return [
        name
        for name in sorted({*given, *wanted})
        if wanted.get(name) not in (given.get(name), begun_with.get(name))
        and not any(fnmatch.fnmatchcase(name, one) for one in OF_RANKS)
    ]


def shadowed(folders: list[str]) -> list[str]:
    """Modules that are imported already, and that these folders would have given instead."""
    imported = {name for name in sys.modules if "." not in name and name not in ("__main__", *_OF_SITE)}
    found = []
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder):
                path, name = os.path.join(folder, entry), entry.partition(".")[0]
                is_module = entry.endswith((".py", ".pyc", ".so")) or os.path.exists(os.path.join(path, "__init__.py"))
                if name in imported and is_module:
                    found.append(path)
    return found


def carry_mark(mark: str) -> bool:
    """Put the mark where others look for it: the environment that this process was started with, which the system
    shows as it lies in memory. False: it can't be done (not Linux, no room)."""
    try:
        import ctypes
    except ImportError:
        return False
    getenv, room = ctypes.CDLL(None).getenv, len(os.environ.get(MARK, ""))
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_void_p
    place, value = getenv(MARK.encode()), mark.encode()
    if not place or len(value) > room:
        return False
    ctypes.memmove(place, value.ljust(room, b"\0"), room)
    return environment().get(MARK) == mark


def run(arguments: list[str], entries: list[str]) -> None:
    """As ``python FILE``: first what PYTHONPATH has for every start of Python, then torchrun."""
    import importlib.machinery
    import runpy

    for name in _OF_SITE:
        if importlib.machinery.PathFinder.find_spec(name, entries) is not None:
            sys.modules.pop(name, None)
            __import__(name)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
