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
        """``message``, with what SIGKILL probably was where it ends with that; nothing is added to another one."""
        if not message.endswith(("SIGKILL", "(SIGKILL)")):
            return message
        if count(self.group) > self.before[0]:
            return f"{message}: the kernel ended it, as its control group had no memory left; {MENDS}"
        if count(self.host) > self.before[1]:
            return f"{message}: the kernel ended a process there, as the host had no memory left; {MENDS}"
        return f"{message}; often that is the kernel's out-of-memory killer: dmesg there names what it has ended"

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


def count(path: str) -> int:
    """The number behind ``oom_kill`` in a table of the kernel's; 0 where it has none."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0
