"""Find and end the processes of a run on this host, and read what /proc shows of a process.

All processes of a start carry its mark (``RUN_ID:NODE_RANK``). Programs have it in their environment. Ranks are forks
of a warm parent, whose environment can't be changed any more, so they hold a memory file with the mark as its name.
"""

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
_WARM_VARIABLE = f"{variables.RANKS}=".encode()  # in the environment of a warm parent and its forks
_MEMORY_FILE = f"/memfd:{variables.MARK_FILE}"
TERM_GRACE_S = 3.0  # between TERM and KILL
_LARGEST_TREE = 256  # a tree of processes is followed until it has this many
_REMOVE_S = 20.0  # for an engine to end and remove a container


def start_time(pid: int) -> str | None:
    """Return when ``pid`` started, as a text to compare, since pids are reused; None: no such process, or a zombie."""
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
    """Return the fields of /proc/PID/stat: 0 state, 1 parent, 3 session, 4 terminal, 19 start time. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()  # behind (NAME), which may hold spaces and brackets


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as in ps; '' without such a process."""
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
    """Yield the fields of each TCP connection. ``folder``: ``/proc/net``, or ``/proc/PID/net`` of one process."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(os.path.join(folder, table), encoding="ascii") as file:
            yield from (line.split() for line in file.readlines()[1:])


def ip_address(text: str) -> str:
    """Convert ``0100007F:1F90`` to 127.0.0.1; the kernel writes words of 4 bytes in the machine's order."""
    words = text.partition(":")[0]
    data = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    if len(data) == 16 and data.startswith(b"\0" * 10 + b"\xff\xff"):  # an IPv4 address as IPv6
        data = data[12:]
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


class Orphans:
    """Makes this process the parent of orphaned descendants, which may have neither mark nor session of the run."""

    adopter: int | None = None  # this process's id, once it adopts orphans

    @classmethod
    def adopt(cls) -> None:
        """Adopt orphans from now on, if the system supports it (Linux). No special rights are needed."""
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes  # some builds of Python lack it

            if LINUX and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
                cls.adopter = os.getpid()

    @classmethod
    def reap(cls, child: int) -> None:
        """Collect ended orphans, which would stay as zombies; but not ``child``, which others wait for."""
        with contextlib.suppress(ChildProcessError):
            while cls.adopter == os.getpid():
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == child:
                    return
                os.waitpid(ended.si_pid, 0)


def find_processes(mark: str, state_dir: str = "") -> set[int]:
    """Return the processes that carry the mark, their descendants, and all members of their sessions.

    A ``mark`` that ends with "-" is a prefix: that of all attempts of a run folder. With ``state_dir``, the folder of
    an attempt whose supervisor is dead, processes that write there count too. They may have lost their mark:
    setproctitle overwrites the environment that /proc shows.
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
    # look once at each process of the host: those with the mark, and how all are related
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        try:
            fields = stat_fields(pid)
            if fields[0] in "ZX":  # a zombie, or dead
                continue
            sessions[pid] = fields[3]
            children.setdefault(int(fields[1]), []).append(pid)
            if state_dir and pid != os.getpid() and writes_in(pid, [state_dir]):
                pids.add(pid)
            with open(f"/proc/{pid}/environ", "rb") as environ:
                environment = environ.read().split(b"\0")
            if any(is_mark(variable, mark) for variable in environment) or (
                any(variable.startswith(_WARM_VARIABLE) for variable in environment) and is_marked_fork(pid, mark)
            ):
                pids.add(pid)
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    own_session = str(os.getsid(0))
    # an adopted orphan is a child of this process in another session
    if Orphans.adopter == os.getpid():
        pids.update(pid for pid in children.get(os.getpid(), []) if sessions[pid] != own_session)
    parents = [*pids]  # their descendants are added next
    while parents:
        new = [pid for pid in children.get(parents.pop(), []) if pid not in pids and pid != os.getpid()]
        pids.update(new)
        parents += new
    # a process may have lost mark and parent, but not its session; this process's own session may hold foreign ones
    run_sessions = {sessions[pid] for pid in pids} - {own_session}
    return pids | {pid for pid, session in sessions.items() if session in run_sessions}


def writes_in(pid: int, folders: list[str]) -> bool:
    """Return whether a process has a file below ``folders`` open for writing. Raises OSError, as ``open_files``."""
    roots = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    for number, target in open_files(pid):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if target.startswith(roots):
                with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
                    flags = next(line for line in file if line.startswith("flags:"))
                if int(flags.split()[1], 8) & (os.O_WRONLY | os.O_RDWR):
                    return True
    return False


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield (descriptor, path) of the open files of a process. Raises OSError: it has ended, or is another user's."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except FileNotFoundError:  # closed meanwhile
            continue
        yield number, target


def works_in(folders: list[str]) -> dict[int, str]:
    """Return id → command of processes with a working directory or a file open for writing in ``folders`` (Linux)."""
    pids: set[int] = set()
    roots = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    for name in filter(str.isdigit, os.listdir("/proc") if LINUX else []):
        pid = int(name)
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            is_dead, has_terminal = fields[0] in "ZX", fields[4] != "0"
            if is_dead or has_terminal or pid == os.getpid():  # at a terminal, a user may just look around there
                continue
            if f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(roots) or writes_in(pid, folders):
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
    """Return whether a fork of a warm parent holds a memory file that is named by the mark. Raises OSError."""
    for _, target in open_files(pid):
        if target.startswith(_MEMORY_FILE):
            own_mark = target[len(_MEMORY_FILE) :].partition(" (deleted)")[0]
            return own_mark.startswith(mark) if mark.endswith("-") else own_mark == mark
    return False


def is_mark(variable: bytes, mark: str) -> bool:
    """Return whether an environment variable (``NAME=value``) is the mark, or begins with it if it is a prefix."""
    expected = f"{variables.NODE}={mark}".encode()
    return variable.startswith(expected) if mark.endswith("-") else variable == expected


def send_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove_container(engine: str, name: str) -> None:
    """Remove a container of podman or docker, if it still exists, and end its processes; without a name do nothing."""
    if name:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            argv = [engine, "rm", "--force", name]
            subprocess.run(argv, capture_output=True, timeout=_REMOVE_S, check=False, cwd="/")


def end_tree(mark: str, grace_s: float, state_dir: str = "", signalled: set[int] | None = None) -> bool:
    """End a run's processes: TERM (not to those in ``signalled``), after ``grace_s`` KILL; return whether all ended."""
    signalled = set() if signalled is None else signalled
    alive = find_processes(mark, state_dir)
    send_all(alive - signalled, signal.SIGTERM)
    signalled |= alive  # for the caller: these need no TERM again
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
