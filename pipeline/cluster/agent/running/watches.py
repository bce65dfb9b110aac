"""Checks of a supervisor while its ranks run.

A silent controller, ranks that end early, kills for lack of memory, and whether torchrun has reached the rendezvous.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time

from trainers.contract.beats import RUNNING

from ..node import control_groups, read_text
from .processes import ip_address, start_time, tcp_table

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


def memory_events_file(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> str:
    """Return the control group's file with the counter; '': there is none. Versions 1 and 2 of Linux' interface."""
    groups = control_groups(own)
    if "memory" in groups:
        return f"{root}/memory{groups['memory']}/memory.oom_control"
    return f"{root}{groups['']}/memory.events" if "" in groups else ""


def oom_kills(path: str) -> int | None:
    """Return the number behind ``oom_kill`` in a table of the kernel; None without one."""
    found = re.search(r"^oom_kill (\d+)$", read_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def counter_increase(before: int | None, after: int | None) -> int | None:
    """Return the increase; None if one of the two could not be read."""
    return None if before is None or after is None else after - before


# Whether this node's torchrun has reached the rendezvous, by the kernel's table of connections.
#
# torchrun itself prints nothing while it waits for the others.


RENDEZVOUS_LOOK_S = 0.5
ESTABLISHED, CLOSE_WAIT, LISTEN = "01", "08", "0A"  # states in the kernel's table


class Rendezvous:
    """Watches until this node has joined. ``endpoint``: address and port of the first node; None: a single node."""

    def __init__(self, endpoint: tuple[str, int] | None, *, first: bool) -> None:
        self.endpoint, self.first = endpoint, first
        self.has_joined = False
        self.left_at: float | None = None  # when the first node closed its connections
        self.looked = time.monotonic()  # torchrun takes at least a second until it connects

    def news(self) -> list[str]:
        """Return a line for the node's log once this node has joined."""
        now = time.monotonic()
        if self.endpoint is None or self.has_joined or now - self.looked < RENDEZVOUS_LOOK_S:
            return []
        self.looked = now
        self.has_joined = (LISTEN if self.first else ESTABLISHED) in self.states(*self.endpoint)
        return (
            ["paceline: torchrun is at {}:{}, where the hosts meet".format(*self.endpoint)] if self.has_joined else []
        )

    def left_s(self) -> float:
        """Return for how long the first node's torchrun has closed its connections to this node; 0: it hasn't.

        A frozen host sees that when it continues. Its ranks may wait for the others anyway, because gloo doesn't notice
        every connection that was closed in the meantime.
        """
        if self.endpoint is None or self.first or not self.has_joined:
            return 0.0
        states = self.states(*self.endpoint)
        # CLOSE_WAIT: the first node has closed the connection, and torchrun here hasn't noticed
        if CLOSE_WAIT not in states or ESTABLISHED in states:
            self.left_at = None
            return 0.0
        now = time.monotonic()
        self.left_at = self.left_at or now
        return now - self.left_at

    def states(self, address: str, port: int) -> set[str]:
        """Return the states of this host's connections to the endpoint; on the first node those of all its sockets."""
        end = f":{port:04X}"
        rows = [fields[1:4] for fields in tcp_table("/proc/net")]  # local and remote address, state
        if self.first:
            return {state for local, _, state in rows if local.endswith(end)}
        return {state for _, remote, state in rows if remote.endswith(end) and ip_address(remote) == address}
