"""The processes of a run on this host: found by their mark, whoever started them, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator

from trainers.contract import variables

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LINUX = os.path.isdir("/proc/self")
POLL_S = 0.05
_OF_RANKS = f"{variables.RANKS}=".encode()
_MEMORY_FILE = f"/memfd:{variables.MARK_FILE}"
TERM_GRACE_S = 3.0
_LARGEST_TREE = 256  # processes that are looked at
_REMOVE_S = 20.0  # for an engine to end and remove a container


def start_time(pid: int) -> str | None:
    """Return when ``pid`` started, in the system's form, to tell a recycled pid; None: no such process, or a zombie."""
    if LINUX:
        try:
            fields = stat_fields(pid)
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    ps = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, errors="replace", check=False
    )
    return ps.stdout.strip() or None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold spaces and brackets. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def process_state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return stat_fields(pid)[0]
    return ""


def children_of(pid: int) -> set[int]:
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids.update(map(int, file.read().split()))
    return pids


def pids_of_tree(pid: int) -> list[int]:
    """Return a process and those below it (only itself if the kernel doesn't list children)."""
    pids = [pid]
    for member in pids:  # grows meanwhile: children of children follow
        pids += children_of(member)
        if len(pids) > _LARGEST_TREE:
            break
    return pids


def tcp_table(folder: str) -> Iterator[list[str]]:
    """Yield the fields of the TCP connections in ``/proc/net``, or in that folder of one process."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(os.path.join(folder, table), encoding="ascii") as file:
            yield from (line.split() for line in file.readlines()[1:])


def ip_address(text: str) -> str:
    """Convert ``0100007F:1F90`` to 127.0.0.1; the kernel writes words of 4 bytes in the machine's order."""
    words = text.partition(":")[0]
    data = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    if len(data) == 16 and data.startswith(b"\0" * 10 + b"\xff\xff"):
        data = data[12:]
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


class Orphans:
    """Makes this process the parent of orphaned descendants, which may have neither the mark nor the session."""

    adopter: int | None = None  # this process's id, once it adopts

    @classmethod
    def adopt(cls) -> None:
        """Adopt orphans from now on, if the system supports it (Linux); needs no rights."""
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes  # a Python may lack it

            if LINUX and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
                cls.adopter = os.getpid()

    @classmethod
    def reap(cls, child: int) -> None:
        """Collect ended orphans, which would stay as zombies; ``child`` is waited for elsewhere."""
        with contextlib.suppress(ChildProcessError):
            while cls.adopter == os.getpid():
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == child:
                    return
                os.waitpid(ended.si_pid, 0)


def find_processes(mark: str, state_dir: str = "") -> set[int]:
    """Return the processes of a run: with ``PACELINE_NODE=mark``, their descendants and the members of their sessions.

    A ``mark`` that ends with "-" is the prefix of all attempts of a run folder. Processes that write in ``state_dir``,
    of an attempt whose agent is dead, count too: setproctitle may have overwritten the environment that /proc shows.
    """
    if not LINUX:  # macOS: environments show with -E; sessions are left out
        ps = subprocess.run(
            ["ps", "-axEww", "-o", "pid=,command="], capture_output=True, text=True, errors="replace", check=False
        )
        rows = (line.split() for line in ps.stdout.splitlines())
        return {int(words[0]) for words in rows if any(is_mark(word.encode(), mark) for word in words)}
    pids: set[int] = set()
    sessions: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        try:
            fields = stat_fields(pid)
            if fields[0] in "ZX":
                continue
            sessions[pid] = fields[3]
            children.setdefault(int(fields[1]), []).append(pid)
            if state_dir and pid != os.getpid() and writes_in(pid, [state_dir]):
                pids.add(pid)
            with open(f"/proc/{pid}/environ", "rb") as environ:
                environment = environ.read().split(b"\0")
            if any(is_mark(variable, mark) for variable in environment) or (
                any(variable.startswith(_OF_RANKS) for variable in environment) and is_marked_fork(pid, mark)
            ):
                pids.add(pid)
        except OSError:
            continue
    own = str(os.getsid(0))
    if Orphans.adopter == os.getpid():
        pids.update(pid for pid in children.get(os.getpid(), []) if sessions[pid] != own)
    parents = [*pids]  # their children are still to be added
    while parents:
        new = [pid for pid in children.get(parents.pop(), []) if pid not in pids and pid != os.getpid()]
        pids.update(new)
        parents += new
    # by its session a process is found that has neither mark nor parent; this process's own session has others' too
    found_sessions = {sessions[pid] for pid in pids} - {own}
    return pids | {pid for pid, session in sessions.items() if session in found_sessions}


def writes_in(pid: int, folders: list[str]) -> bool:
    """Whether a process has a file below ``folders`` open for writing. Raises OSError: it has ended, or is foreign."""
    begins = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    for number, target in open_files(pid):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if target.startswith(begins):
                with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
                    flags = next(line for line in file if line.startswith("flags:"))
                if int(flags.split()[1], 8) & (os.O_WRONLY | os.O_RDWR):
                    return True
    return False


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the descriptors of a process and their files. Raises OSError: it has ended, or is another user's."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except FileNotFoundError:  # closed meanwhile
            continue
        yield number, target


def works_in(folders: list[str]) -> dict[int, str]:
    """Find processes without a terminal that stand or write in one of ``folders``: id → command (Linux)."""
    pids: set[int] = set()
    begins = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    for name in filter(str.isdigit, os.listdir("/proc") if LINUX else []):
        pid = int(name)
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            if fields[0] in "ZX" or fields[4] != "0" or pid == os.getpid():
                continue
            if f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(begins) or writes_in(pid, folders):
                pids.add(pid)
    return commands_of(pids)


def commands_of(pids: set[int]) -> dict[int, str]:
    """Return process id → command line of those processes that still exist."""
    commands: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            commands[pid] = file.read().replace("\0", " ").strip()
    return commands


def is_marked_fork(pid: int, mark: str) -> bool:
    """Whether a fork of a warm parent has the mark: in the name of an open memory file. Raises OSError."""
    for _, target in open_files(pid):
        if target.startswith(_MEMORY_FILE):
            own_mark = target[len(_MEMORY_FILE) :].partition(" (deleted)")[0]
            return own_mark.startswith(mark) if mark.endswith("-") else own_mark == mark
    return False


def is_mark(variable: bytes, mark: str) -> bool:
    """Whether an environment variable is ``PACELINE_NODE=mark``, or begins so if ``mark`` is a prefix."""
    expected = f"{variables.NODE}={mark}".encode()
    return variable.startswith(expected) if mark.endswith("-") else variable == expected


def send_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove_container(engine: str, name: str) -> None:
    """Remove a container of podman or docker, and end its processes; one that is gone, or has no name, is no error."""
    if name:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            argv = [engine, "rm", "--force", name]
            subprocess.run(argv, capture_output=True, timeout=_REMOVE_S, check=False, cwd="/")


def end_tree(mark: str, grace_s: float, state_dir: str = "", signalled: set[int] | None = None) -> bool:
    """Send TERM to a run's processes but ``signalled`` ones, KILL after ``grace_s``; return whether all have ended.

    Adds the processes it finds to ``signalled``.
    """
    signalled = set() if signalled is None else signalled
    alive = find_processes(mark, state_dir)
    send_all(alive - signalled, signal.SIGTERM)
    signalled |= alive
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = find_processes(mark, state_dir)
    deadline = time.monotonic() + 3
    while alive and time.monotonic() < deadline:
        send_all(alive, signal.SIGKILL)
        time.sleep(POLL_S)
        alive = find_processes(mark, state_dir)
    return not alive
