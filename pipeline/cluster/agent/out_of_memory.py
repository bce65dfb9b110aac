"""Whether the kernel has ended processes for want of memory, as its counters tell: its log is not for everybody."""

# Much of this is /proc and /sys: os.path all the way.
# ruff: noqa: PTH123
from __future__ import annotations

import contextlib

from .wire import Json

MENDS = "fewer ranks, a smaller batch, or a larger limit for the group (docker run --memory=…)"


class OutOfMemory:
    """Counts what the kernel ended from now on, in this process's control group and on the whole host."""

    def __init__(self) -> None:
        self.host, self.group = "/proc/vmstat", group_file()
        self.before = count(self.group), count(self.host)

    def explained(self, message: str) -> str:
        """``message``, with what the counters say of memory where it ends with SIGKILL; another message as it is.

        The group counts what was ended in it, also where the whole host had no memory left: the host's counter decides
        only where the group has none.
        """
        if not message.endswith(("SIGKILL", "(SIGKILL)")):
            return message
        in_group, on_host = increase(self.before[0], count(self.group)), increase(self.before[1], count(self.host))
        if in_group:
            return f"{message}: the kernel ended it, as its control group had no memory left; {MENDS}"
        if in_group is None and on_host:
            return f"{message}: the kernel ended a process there, as the host had no memory left; {MENDS}"
        if in_group is None and on_host is None:
            return message
        where = "on that host" if in_group is None else "in its control group"
        return f"{message}; the kernel has counted no out-of-memory kill {where}"

    def explain(self, error: Json) -> Json:
        """The same of a rank's error."""
        return {**error, "message": self.explained(str(error["message"]))}


def group_file(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> str:
    """The file of this process's control group that counts; '': there is none. Versions 1 and 2 of Linux' interface."""
    with contextlib.suppress(OSError), open(own, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
        found = {name: path for _, names, path in rows for name in names.split(",")}
        if "memory" in found:
            return f"{root}/memory{found['memory']}/memory.oom_control"
        if "" in found:
            return f"{root}{found['']}/memory.events"
    return ""


def count(path: str) -> int | None:
    """The number behind ``oom_kill`` in a table of the kernel's; None where it has none."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None


def increase(before: int | None, after: int | None) -> int | None:
    """None where one of the two could not be read."""
    return None if before is None or after is None else after - before
