"""Limits of this login and of its control groups, and the memory that is free."""

from __future__ import annotations

import os
import re
import resource

from trainers.contract.host_facts import ControlGroup, Limit, Limits

from ..node import control_groups, read_text


def limits() -> Limits:
    """Return the limits of this process, which the ranks inherit."""

    def limit(which: int) -> Limit:
        return Limit(*(None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)))

    return Limits(open_files=limit(resource.RLIMIT_NOFILE), locked_memory_bytes=limit(resource.RLIMIT_MEMLOCK))


def shared_memory_free_bytes(folder: str = "/dev/shm") -> int | None:
    """Return the free bytes of the file system for shared memory."""
    if not os.path.isdir(folder):
        return None
    disk = os.statvfs(folder)
    return disk.f_frsize * disk.f_bavail


def memory_available_bytes(table: str = "/proc/meminfo") -> int | None:
    """Return the bytes that new processes could use without swapping."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", read_text(table), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def control_group(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> ControlGroup:
    """Return the tightest limits of this process's control groups up to the root.

    Reads versions 1 and 2 of Linux' interface.
    """
    paths = control_groups(own)
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []  # limit and use
    for folder in _ancestors(root, paths.get("")):
        quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
        cpus += _cpu_limit(quota, period)
        memory += _memory_limit_and_use(folder, "memory.max", "memory.current")
    for folder in _ancestors(f"{root}/cpu", paths.get("cpu")):
        cpus += _cpu_limit(read_text(f"{folder}/cpu.cfs_quota_us"), read_text(f"{folder}/cpu.cfs_period_us"))
    for folder in _ancestors(f"{root}/memory", paths.get("memory")):
        memory += _memory_limit_and_use(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = min(memory, key=lambda pair: pair[0] - pair[1]) if memory else (None, None)
    return ControlGroup(cpus=min(cpus, default=None), memory_bytes=limit, memory_used_bytes=used)


def _ancestors(root: str, path: str | None) -> list[str]:
    """Return the folders of a control group and of its parents, as far as they are mounted here."""
    if path is None or not os.path.isdir(root):
        return []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]


def _cpu_limit(quota: str, period: str) -> list[float]:
    """Return the limit in cores; empty without one (``max``, or -1 in version 1)."""
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []


def _memory_limit_and_use(folder: str, limit_file: str, use_file: str) -> list[tuple[int, int]]:
    """Return limit and use in bytes; empty without a limit, which version 1 writes as a number near 2^63.

    The use excludes cached file contents, which the kernel drops when it needs the room.
    """
    limit, used = read_text(f"{folder}/{limit_file}"), read_text(f"{folder}/{use_file}")
    if not (limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60):
        return []
    counters: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", read_text(f"{folder}/memory.stat"), re.MULTILINE))
    cached = int(counters.get("total_inactive_file", counters.get("inactive_file", "0")))
    return [(int(limit), max(0, int(used) - cached))]
