"""The host's facts for preflight: limits of the login, memory, clock, network devices.

Read from files, except for one lookup of the host's own name. Unknown facts are left out or null.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import socket
import threading

from ..running.claims import described_claims
from ..wire import Json, in_thread
from .processors import gpu_state
from .reach import encoded_name

NAME_S = 1.0  # limit for the look-up of the host's own name; nothing else here waits


def facts(gpu_s: float) -> Json:
    """Return the facts that every probe reports.

    ``gpu_s``: seconds that nvidia-smi may take; 0: it isn't run.
    """
    name: Json = {}
    resolved = threading.Event()
    in_thread(resolve_own_name, name, resolved, on_error=lambda _: resolved.set())
    gpus = gpu_state(gpu_s) if gpu_s else None
    read = {
        "limits": limits(),
        "shared_memory": shared_memory(),
        "memory_available_bytes": memory_available(),
        "cgroup": cgroup(),
        "links": links(),
        "infiniband": infiniband(),
        "gpus": gpus,
        "claims": described_claims(),
    }
    resolved.wait(NAME_S)
    return {**read, "own_name": dict(name) if resolved.is_set() else {"slow_s": NAME_S}}


def resolve_own_name(own_name: Json, resolved: threading.Event) -> None:
    """Write the addresses of this host's own name, as programs here resolve it; none if it doesn't resolve."""
    try:
        answers = socket.getaddrinfo(encoded_name(socket.gethostname()), None, type=socket.SOCK_STREAM)
    except OSError:
        answers = []
    own_name["addresses"] = sorted({str(address[0]) for *_, address in answers})
    resolved.set()


def limits() -> Json:
    """Return limits of this process, which the ranks inherit: soft and hard, null for none."""

    def pair(which: int) -> list[int | None]:
        return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]

    return {"open_files": pair(resource.RLIMIT_NOFILE), "locked_memory_bytes": pair(resource.RLIMIT_MEMLOCK)}


def shared_memory(folder: str = "/dev/shm") -> Json | None:
    """Return size and free bytes of the file system for shared memory."""
    if not os.path.isdir(folder):
        return None
    disk = os.statvfs(folder)
    return {"size_bytes": disk.f_frsize * disk.f_blocks, "free_bytes": disk.f_frsize * disk.f_bavail}


def memory_available(table: str = "/proc/meminfo") -> int | None:
    """Return the bytes that new processes could use without swapping."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text(table), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def cgroup(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Json:
    """Return the limits of this process's control groups: cores, bytes of memory, and the bytes in use.

    The tightest limit up to the root counts; null without one. Reads versions 1 and 2 of Linux' interface.
    """
    places = {}  # controller ('' in version 2) → path below its hierarchy
    for line in text(own).splitlines():
        _, names, path = line.split(":", 2)
        places.update(dict.fromkeys(names.split(","), path))
    cpus, memory = [], []
    for folder in ancestors(root, places.get("")):
        quota, _, period = text(f"{folder}/cpu.max").partition(" ")
        cpus += [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []
        memory += limit_and_use(folder, "memory.max", "memory.current")
    for folder in ancestors(f"{root}/cpu", places.get("cpu")):
        quota, period = text(f"{folder}/cpu.cfs_quota_us"), text(f"{folder}/cpu.cfs_period_us")
        cpus += [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []
    for folder in ancestors(f"{root}/memory", places.get("memory")):
        memory += limit_and_use(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = min(memory, key=lambda pair: pair[0] - pair[1]) if memory else (None, None)
    return {"cpus": min(cpus) if cpus else None, "memory_bytes": limit, "memory_used_bytes": used}


def ancestors(root: str, path: str | None) -> list[str]:
    """Return the folders of a control group and of its parents, as far as they are mounted here."""
    if path is None or not os.path.isdir(root):
        return []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]


def limit_and_use(folder: str, limit: str, use: str) -> list[tuple[int, int]]:
    """Return limit and use in bytes; empty without a limit, which version 1 writes as a number near 2^63.

    The use excludes cached file contents, which the kernel drops when it needs the room.
    """
    most, used = text(f"{folder}/{limit}"), text(f"{folder}/{use}")
    if not (most.isdecimal() and used.isdecimal() and int(most) < 1 << 60):
        return []
    counters: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", text(f"{folder}/memory.stat"), re.MULTILINE))
    idle = int(counters.get("total_inactive_file", counters.get("inactive_file", "0")))
    return [(int(most), max(0, int(used) - idle))]


def links(root: str = "/sys/class/net") -> Json:
    """Return interface → state (``up``, ``down``, ``unknown``), MTU, and Mbit/s if the driver reports it."""
    interfaces = {}
    for folder in glob.glob(f"{root}/*/"):
        speed = text(f"{folder}speed")  # an error, or -1, while the link is down
        interfaces[os.path.basename(folder[:-1])] = {
            "state": text(f"{folder}operstate") or "unknown",
            "mtu": number(text(f"{folder}mtu")),
            "speed_mbit": int(speed) if speed.isdecimal() else None,
        }
    return interfaces


def infiniband(root: str = "/sys/class/infiniband") -> list[Json]:
    """Return each port of each RDMA device, as ibstatus and ibdev2netdev show it."""
    ports = []
    for folder in sorted(glob.glob(f"{root}/*/ports/*")):
        device = os.path.dirname(os.path.dirname(folder))
        port = os.path.basename(folder)
        ports.append(
            {
                "device": os.path.basename(device),
                "port": number(port),
                "state": text(f"{folder}/state").partition(": ")[2],
                "phys_state": text(f"{folder}/phys_state").partition(": ")[2],
                "rate": text(f"{folder}/rate"),
                "link_layer": text(f"{folder}/link_layer"),
                "gid": text(f"{folder}/gids/0"),
                "netdev": netdev_of(device, folder, port),
            }
        )
    return ports


def netdev_of(device: str, folder: str, port: str) -> str | None:
    """Return the network interface of an RDMA port, by its first GID, else by the port number."""
    named = text(f"{folder}/gid_attrs/ndevs/0")
    if named:
        return named
    for place in sorted(glob.glob(f"{device}/device/net/*")):
        index = text(f"{place}/dev_port") or "0"
        if index.isdecimal() and int(index) + 1 == number(port):
            return os.path.basename(place)
    return None


def text(path: str) -> str:
    """Return the stripped text of a file; empty if it can't be read."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""


def number(digits: str) -> int | None:
    return int(digits) if digits.isdecimal() else None
