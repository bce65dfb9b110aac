"""Checks of a supervisor while its ranks run.

A silent controller, stopped processes, ranks that end early, kills for lack of memory, and whether torchrun has reached
the rendezvous.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import sys
import time

from trainers.contract.beats import RUNNING

from ..host.processors import variable_of
from ..wire import Json
from .processes import start_time, stat_fields

LONGEST_LOOK_S = 1.5  # between two looks at a silent file; in any longer time this process was stopped itself


class Silence:
    """The seconds for which a file has not changed, as seen by this process.

    Only changes count, neither the system's clock (which may be set) nor the file's time stamp. Times in which this
    process, its machine or its container was stopped don't count, because it could see no change then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds = 0.0
        self.looked = time.monotonic()
        self.seen = self.state()

    def state(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            return status.st_mtime_ns, status.st_ino
        return None

    def look(self) -> float:
        now, seen = time.monotonic(), self.state()
        changed = seen is not None and seen != self.seen
        self.seconds = 0.0 if changed else self.seconds + min(now - self.looked, LONGEST_LOOK_S)
        self.looked, self.seen = now, seen or self.seen
        return self.seconds


# Processes of a run that somebody has stopped (SIGSTOP): the run waits for them, and no part of it can say why.


STOPS_LOOK_S = 1.0
STOPPED_S = 3.0  # until it is reported: a program that slows a process down stops it for moments


class Stops:
    """Watches torchrun and its descendants for stopped processes; ``root`` is its process id."""

    def __init__(self, root: int | None = None) -> None:
        self.root = root
        self.looked = time.monotonic()
        self.since: dict[int, float] = {}  # process id → when it was first seen stopped
        self.reported: set[int] = set()

    def news(self) -> list[str]:
        """Return lines for the node's log, one for each process that has been stopped for a while."""
        now = time.monotonic()
        if self.root is None or now - self.looked < STOPS_LOOK_S:
            return []
        self.looked = now
        stopped = [pid for pid in process_tree(self.root) if process_state(pid) == "T"]
        self.since = {pid: self.since.get(pid, now) for pid in stopped}
        self.reported.intersection_update(stopped)
        new = [pid for pid in stopped if pid not in self.reported and now - self.since[pid] >= STOPPED_S]
        self.reported.update(new)
        return [
            f"paceline: WARNING: process {pid}{_rank_of(pid)} is stopped (SIGSTOP), and the run waits for it; "
            f"kill -CONT {pid} lets it go on"
            for pid in new
        ]


def _rank_of(pid: int) -> str:
    """Return `` of rank 1``; '' for a process that torchrun hasn't started: a fork shows its parent's environment."""
    rank = variable_of(pid, "RANK")
    return f" of rank {rank}" if rank.isdecimal() else ""


def process_tree(root: int) -> list[int]:
    """Return ``root`` and the descendants of main threads; only ``root`` if the system doesn't list them."""
    pids = [root]
    for pid in pids:  # grows meanwhile: children of children follow
        pids += children_of(pid)
    return pids


def children_of(pid: int) -> set[int]:
    """Return the running children of a process's main thread; none if the system doesn't list them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return set(map(int, file.read().split()))
    return set()


def process_state(pid: int) -> str:
    """Return the system's state letter; '' if there is no such process."""
    with contextlib.suppress(OSError):
        return stat_fields(pid)[0]
    return ""


# Ranks that ended before their run was over, perhaps with exit code 0, which torchrun takes for success and waits.
#
# A rank's entry creates ``running-PID`` next to its error file, and removes it at a good end. So a rank without a
# process, but with that file, has ended by itself, unless torchrun or the agent ended it. If several ranks end at once,
# torchrun reports the first one's exit code while it ends the others, and all exit codes in a table at its own end.


_CLOSING = re.compile(r"Sending process (\d+) closing signal")  # torchrun does this after another rank's failure
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")


class EarlyExits:
    """Watches the ranks of one node, whose state folder is ``state``, for ends before the run is over."""

    def __init__(self, state: str) -> None:
        self._pattern = os.path.join(glob.escape(state), f"ranks/*/attempt_*/*/{RUNNING}*")
        self._ended_by_others: set[int] = set()
        self._codes: dict[int, int] = {}
        self._begun: set[int] | None = None  # the ranks that had begun when all were ended

    def read(self, line: str) -> None:
        """Read a line of torchrun."""
        closing, code = _CLOSING.search(line), _CODE.match(line)
        if closing:
            self._ended_by_others.add(int(closing[1]))
        if code:
            self._codes[int(code[2])] = int(code[1])

    @property
    def torchrun_ends_others(self) -> bool:
        """Whether torchrun has seen a failure, and will report it after ending the other ranks."""
        return bool(self._ended_by_others)

    def about_to_end_all(self) -> None:
        """Note that the agent now ends all living ranks."""
        if self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
        self._ended_by_others |= {pid for _, pid in self._unfinished() if start_time(pid) is not None}

    def torchrun_ended(self, code: int) -> None:
        """Note the end of torchrun. A signal that ended it may have ended ranks too, and nothing shows which."""
        if code < 0 and self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
            self._ended_by_others |= self._begun

    def ranks(self) -> dict[int, int]:
        """Return local ranks that have ended by themselves, with their exit codes; 0 also if torchrun reported none."""
        unfinished = [(rank, pid) for rank, pid in self._unfinished() if self._begun is None or pid in self._begun]
        ended = (
            (rank, pid) for rank, pid in unfinished if pid not in self._ended_by_others and start_time(pid) is None
        )
        return {rank: self._codes.get(pid, 0) for rank, pid in ended}

    def _unfinished(self) -> list[tuple[int, int]]:
        """Return (local rank, process id) of each rank without a good end."""
        places = (path.rsplit("/", 2) for path in glob.glob(self._pattern))
        return [(int(rank), int(name.removeprefix(RUNNING))) for _, rank, name in places]


# Kills for lack of memory, by the kernel's counters, because not every user may read its log.


MEMORY_HINT = "fewer ranks, a smaller batch, or a larger limit for the group (docker run --memory=…)"


class OutOfMemory:
    """Counts the kernel's kills from now on, in this process's control group and on the whole host."""

    def __init__(self) -> None:
        self.host, self.group = "/proc/vmstat", memory_events_file()
        self.before = oom_kills(self.group), oom_kills(self.host)

    def explained(self, message: str) -> str:
        """Return ``message``, with the memory counters if it ends with SIGKILL; other messages unchanged.

        The control group counts its kills even if the whole host was out of memory, so the host's counter decides only
        without a group.
        """
        if not message.endswith(("SIGKILL", "(SIGKILL)")):
            return message
        in_group = counter_increase(self.before[0], oom_kills(self.group))
        on_host = counter_increase(self.before[1], oom_kills(self.host))
        if in_group:
            return f"{message}: the kernel ended it, as its control group had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host:
            return f"{message}: the kernel ended a process there, as the host had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host is None:
            return message
        where = "on that host" if in_group is None else "in its control group"
        return f"{message}; the kernel has counted no out-of-memory kill {where}"

    def explain(self, error: Json) -> Json:
        """Return a rank's error with its message ``explained``."""
        return {**error, "message": self.explained(str(error["message"]))}


def memory_events_file(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> str:
    """Return the control group's file with the counter; '': there is none. Versions 1 and 2 of Linux' interface."""
    with contextlib.suppress(OSError), open(own, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
        paths = {name: path for _, names, path in rows for name in names.split(",")}
        if "memory" in paths:
            return f"{root}/memory{paths['memory']}/memory.oom_control"
        if "" in paths:
            return f"{root}{paths['']}/memory.events"
    return ""


def oom_kills(path: str) -> int | None:
    """Return the number behind ``oom_kill`` in a table of the kernel; None without one."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None


def counter_increase(before: int | None, after: int | None) -> int | None:
    """Return the increase; None if one of the two could not be read."""
    return None if before is None or after is None else after - before


# Whether this node's torchrun has reached the rendezvous, by the kernel's table of connections.
#
# torchrun itself prints nothing while it waits for the others, and a SYN that a firewall drops is no error for minutes.


RENDEZVOUS_LOOK_S = 0.5
UNANSWERED_S = 3.0  # until it is reported
REPEAT_S = 30.0  # until it is reported again
ESTABLISHED, SYN_SENT, CLOSE_WAIT, LISTEN = "01", "02", "08", "0A"  # states in the kernel's table


class Rendezvous:
    """Watches until this node has joined. ``place`` is address and port of the first node; None: a single node."""

    def __init__(self, place: list[str | int] | None, *, first: bool) -> None:
        self.place, self.first = place, first
        self.joined: list[str | int] | None = None  # the place, once this node has joined
        self.left_at: float | None = None  # when the first node closed its connections
        self.looked = time.monotonic()  # torchrun takes at least a second until it connects
        self.reported_at = 0.0
        self.trying: float | None = None  # when the first unanswered SYN was sent

    def news(self) -> list[str]:
        """Return lines for the node's log; mostly none."""
        now = time.monotonic()
        if self.place is None or now - self.looked < RENDEZVOUS_LOOK_S:
            return []
        self.looked = now
        where, states = "{}:{}".format(*self.place), self.states(self.place)
        if (LISTEN if self.first else ESTABLISHED) in states:
            self.joined, self.place = self.place, None
            return [f"paceline: torchrun is at {where}, where the hosts meet"]
        if SYN_SENT not in states:
            self.trying = None
            return []
        self.trying = self.trying or now
        if now - self.trying < UNANSWERED_S or now - self.reported_at < REPEAT_S:
            return []
        self.reported_at = now
        return [f"paceline: no answer from {where}, where the hosts meet, for {now - self.trying:.0f} s"]

    def left_s(self) -> float:
        """Return for how long the first node's torchrun has closed its connections to this node; 0: it hasn't.

        A frozen host sees that when it continues. Its ranks may wait for the others anyway, because gloo doesn't notice
        every connection that was closed in the meantime.
        """
        if self.first or self.joined is None:
            return 0.0
        states = self.states(self.joined)
        # CLOSE_WAIT: the first node has closed the connection, and torchrun here hasn't noticed
        if CLOSE_WAIT not in states or ESTABLISHED in states:
            self.left_at = None
            return 0.0
        now = time.monotonic()
        self.left_at = self.left_at or now
        return now - self.left_at

    def states(self, place: list[str | int]) -> set[str]:
        """Return the states of this host's connections to the place; on the first node of the sockets at that port."""
        address, port = address_in_table(str(place[0])), f":{int(place[1]):04X}"
        states = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
                for line in lines:
                    _, local, remote, state, *_ = line.split()
                    if self.first and local.endswith(port):
                        states.add(state)
                    if not self.first and remote.endswith(f"{address}{port}"):
                        states.add(state)
        return states


def address_in_table(address: str) -> str:
    """Return an address as the kernel's table shows it, in words of the processor's byte order; '' for a name.

    The text of an IPv4 address is also the end of the IPv6 address that maps it.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            data = socket.inet_pton(family, address)
            words = (data[start : start + 4] for start in range(0, len(data), 4))
            return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return ""
