"""What a supervisor watches for while its ranks run: a silent controller, stopped processes, ranks that end too early,
kills for want of memory, and whether torchrun has come to where the nodes meet."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import sys
import time

from trainers.contract.beats import RUNNING

from ..wire import Json
from .processes import start_time

LONGEST_LOOK_S = 1.5  # of one look at a silent file to the next: what is beyond, this process was stopped itself


class Silence:
    """For how many seconds a file has not changed, as this process saw it.

    Neither the system's clock (which may be set) nor a time stamp of the file's counts, only changes; and no time in
    which this process, its machine or its container was stopped: nobody could have been heard then.
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


# Processes of a run that somebody has stopped (SIGSTOP): the run waits for them, and none of it can say why.


STOPS_LOOK_S = 1.0
STOPPED_S = 3.0  # until it is said: who paces a process stops it for moments


class Stops:
    """Looks at torchrun and all that it has started; ``root`` is its process id."""

    def __init__(self, root: int | None = None) -> None:
        self.root = root
        self.looked = time.monotonic()
        self.since: dict[int, float] = {}  # process id → when it was first seen stopped
        self.said: set[int] = set()

    def news(self) -> list[str]:
        """Lines for the log of the node, one for each process that has stood still for a while."""
        now = time.monotonic()
        if self.root is None or now - self.looked < STOPS_LOOK_S:
            return []
        self.looked = now
        stopped = [pid for pid in process_tree(self.root) if process_state(pid) == "T"]
        self.since = {pid: self.since.get(pid, now) for pid in stopped}
        self.said.intersection_update(stopped)
        new = [pid for pid in stopped if pid not in self.said and now - self.since[pid] >= STOPPED_S]
        self.said.update(new)
        return [
            f"paceline: WARNING: process {pid} is stopped (SIGSTOP), and the run waits for it; "
            f"kill -CONT {pid} lets it go on"
            for pid in new
        ]


def process_tree(root: int) -> list[int]:
    """``root`` and what its main thread, and theirs, have started; no more than that where the system doesn't tell."""
    pids = [root]
    for pid in pids:  # grows meanwhile: children of children follow
        pids += children_of(pid)
    return pids


def children_of(pid: int) -> set[int]:
    """What the main thread of a process has started and still runs; nothing where the system doesn't tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return set(map(int, file.read().split()))
    return set()


def process_state(pid: int) -> str:
    """The system's letter for it; '' where there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


# Ranks that ended while their run was not over, perhaps with exit code 0: torchrun takes that for success, and waits.
#
# The entry of a rank makes ``running-PID`` beside its error file and removes it at a good end. A rank whose process is
# gone and whose file is there has ended by itself, unless torchrun or the agent told it to. Of several that end at once
# torchrun tells the first one's exit code while it ends the others, and all of them in the table of its last words.


_CLOSING = re.compile(r"Sending process (\d+) closing signal")  # torchrun does this after another rank's failure
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")


class EarlyExits:
    """What is known of the ranks of one node, whose state folder is ``state``."""

    def __init__(self, state: str) -> None:
        self._pattern = os.path.join(glob.escape(state), f"ranks/*/attempt_*/*/{RUNNING}*")
        self._ended_by_others: set[int] = set()
        self._codes: dict[int, int] = {}
        self._begun: set[int] | None = None  # once the end of all has come: the ranks that had begun by then

    def read(self, line: str) -> None:
        """A line of torchrun's."""
        closing, code = _CLOSING.search(line), _CODE.match(line)
        if closing:
            self._ended_by_others.add(int(closing[1]))
        if code:
            self._codes[int(code[2])] = int(code[1])

    @property
    def torchrun_ends_others(self) -> bool:
        """Whether it has seen a failure, and will tell of it when the other ranks are gone."""
        return bool(self._ended_by_others)

    def about_to_end_all(self) -> None:
        """Whoever is alive now is told to end by the agent."""
        if self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
        self._ended_by_others |= {pid for _, pid in self._unfinished() if start_time(pid) is not None}

    def torchrun_ended(self, code: int) -> None:
        """Where a signal of somebody else's ended torchrun, the same may have ended ranks, and nobody knows."""
        if code < 0 and self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
            self._ended_by_others |= self._begun

    def ranks(self) -> dict[int, int]:
        """Local ranks that have ended by themselves, with their exit codes; 0 also where torchrun has told of none."""
        unfinished = [(rank, pid) for rank, pid in self._unfinished() if self._begun is None or pid in self._begun]
        ended = (
            (rank, pid) for rank, pid in unfinished if pid not in self._ended_by_others and start_time(pid) is None
        )
        return {rank: self._codes.get(pid, 0) for rank, pid in ended}

    def _unfinished(self) -> list[tuple[int, int]]:
        """(local rank, process id) of each rank that has not come to a good end."""
        places = (path.rsplit("/", 2) for path in glob.glob(self._pattern))
        return [(int(rank), int(name.removeprefix(RUNNING))) for _, rank, name in places]


# Whether the kernel has ended processes for want of memory, as its counters tell: its log is not for everybody.


MEMORY_HINT = "fewer ranks, a smaller batch, or a larger limit for the group (docker run --memory=…)"


class OutOfMemory:
    """Counts what the kernel ended from now on, in this process's control group and on the whole host."""

    def __init__(self) -> None:
        self.host, self.group = "/proc/vmstat", memory_events_file()
        self.before = oom_kills(self.group), oom_kills(self.host)

    def explained(self, message: str) -> str:
        """``message``, with what the counters say of memory where it ends with SIGKILL; another message as it is.

        The group counts what was ended in it, also where the whole host had no memory left: the host's counter decides
        only where the group has none.
        """
        if not message.endswith(("SIGKILL", "(SIGKILL)")):
            return message
        in_group, on_host = (
            counter_increase(self.before[0], oom_kills(self.group)),
            counter_increase(self.before[1], oom_kills(self.host)),
        )
        if in_group:
            return f"{message}: the kernel ended it, as its control group had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host:
            return f"{message}: the kernel ended a process there, as the host had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host is None:
            return message
        where = "on that host" if in_group is None else "in its control group"
        return f"{message}; the kernel has counted no out-of-memory kill {where}"

    def explain(self, error: Json) -> Json:
        """A rank's error with its message ``explained``."""
        return {**error, "message": self.explained(str(error["message"]))}


def memory_events_file(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> str:
    """The file of this process's control group that counts; '': there is none. Versions 1 and 2 of Linux' interface."""
    with contextlib.suppress(OSError), open(own, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
        paths = {name: path for _, names, path in rows for name in names.split(",")}
        if "memory" in paths:
            return f"{root}/memory{paths['memory']}/memory.oom_control"
        if "" in paths:
            return f"{root}{paths['']}/memory.events"
    return ""


def oom_kills(path: str) -> int | None:
    """The number behind ``oom_kill`` in a table of the kernel's; None where it has none."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None


def counter_increase(before: int | None, after: int | None) -> int | None:
    """None where one of the two could not be read."""
    return None if before is None or after is None else after - before


# Whether torchrun of this node has come to where all nodes meet, by the kernel's table of connections.
#
# torchrun itself says nothing while it waits for the others, and a SYN that a firewall drops is no error for minutes.


RENDEZVOUS_LOOK_S = 0.5
UNANSWERED_S = 3.0  # until it is said, then
AGAIN_S = 30.0  # from one time to the next
ESTABLISHED, SYN_SENT, CLOSE_WAIT, LISTEN = "01", "02", "08", "0A"  # as the kernel's table has them


class Rendezvous:
    """Looks until this node has come. ``place`` is address and port of the first node; None: nodes don't meet."""

    def __init__(self, place: list[str | int] | None, *, first: bool) -> None:
        self.place, self.first = place, first
        self.met: list[str | int] | None = None  # the place, once this node has come
        self.left_at: float | None = None  # since when the first node has left it
        self.looked = time.monotonic()  # torchrun takes a second at least until it comes
        self.said = 0.0
        self.trying: float | None = None  # since when a SYN has had no answer

    def news(self) -> list[str]:
        """Lines for the log of the node; mostly none."""
        now = time.monotonic()
        if self.place is None or now - self.looked < RENDEZVOUS_LOOK_S:
            return []
        self.looked = now
        where, states = "{}:{}".format(*self.place), self.states(self.place)
        if (LISTEN if self.first else ESTABLISHED) in states:
            self.met, self.place = self.place, None
            return [f"paceline: torchrun is at {where}, where the hosts meet"]
        if SYN_SENT not in states:
            self.trying = None
            return []
        self.trying = self.trying or now
        if now - self.trying < UNANSWERED_S or now - self.said < AGAIN_S:
            return []
        self.said = now
        return [f"paceline: no answer from {where}, where the hosts meet, for {now - self.trying:.0f} s"]

    def left_s(self) -> float:
        """For how long torchrun of the first node has closed its connections to this node; 0: it has not.

        A host that was frozen finds that when it goes on. Its ranks may wait for the others all the same: gloo doesn't
        see every connection that was closed meanwhile.
        """
        if self.first or self.met is None:
            return 0.0
        states = self.states(self.met)
        # CLOSE_WAIT: the first node has closed the connection, and torchrun here hasn't noticed
        if CLOSE_WAIT not in states or ESTABLISHED in states:
            self.left_at = None
            return 0.0
        now = time.monotonic()
        self.left_at = self.left_at or now
        return now - self.left_at

    def states(self, place: list[str | int]) -> set[str]:
        """Of this host's connections to the place; on the first node of the sockets at that port."""
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
    """As the table shows it, in words of the processor's byte order; an IPv4 address also ends the IPv6 one that maps
    it. Empty for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            data = socket.inet_pton(family, address)
            words = (data[start : start + 4] for start in range(0, len(data), 4))
            return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return ""
