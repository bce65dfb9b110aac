"""The host's facts for a launch and for preflight's checks. No installed package is imported.

Facts that can't be read are left out or null.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import resource
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable

from ..node import address_and_port, control_groups, from_environment, identity, machine, read_text
from ..running.claims import described_claims
from ..running.folders import holds_pack, tidy_workdir
from ..running.processes import LINUX
from ..running.warm import warm_up
from ..wire import Json, free_bytes, in_thread, say
from . import container
from .processors import count_cpus, count_gpus, gpu_state, hardware
from .reach import encoded_name
from .software import software

NAME_S = 1.0  # limit for the look-up of the host's own name; nothing else here waits


def interfaces() -> dict[str, str]:
    """Return every address of this node with its interface (Linux; elsewhere empty)."""
    by_address: dict[str, str] = {}
    if not LINUX:
        return by_address

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # interfaces without an IPv4 address
                question = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe_socket.fileno(), 0x8915, question)  # SIOCGIFADDR
                by_address[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            by_address[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return by_address


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def numa(system: str = "/sys") -> bool:
    """Whether torchrun can bind each rank to the cores near its GPU.

    It can if numactl exists, the system knows the NUMA node of each NVIDIA device, and this process may use cores of
    all these nodes.
    """
    if shutil.which("numactl") is None:
        return False
    try:
        vendors = glob.glob(f"{system}/bus/pci/devices/*/vendor")
        folders = [os.path.dirname(path) for path in vendors if read_text(path) == "0x10de"]
        nodes = {read_text(os.path.join(folder, "numa_node")) for folder in folders}
        cores = [cores_of(read_text(f"{system}/devices/system/node/node{node}/cpulist")) for node in nodes]
        return bool(cores) and all(node_cores & os.sched_getaffinity(0) for node_cores in cores)
    except (AttributeError, ValueError):  # a node of -1 has no folder; macOS tells no affinity
        return False


def cores_of(ranges: str) -> set[int]:
    """Parse ``0-2,8`` into {0, 1, 2, 8}."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def login(request: Json) -> Json:
    """Return the machine behind this login, and its variables.

    ``env``: variables that decide where ranks run. ``left_behind``: relevant variables that don't reach the ranks.
    """
    return {
        "machine": machine(),
        "env": from_environment(request.get("env_names", [])),
        "left_behind": from_environment(request.get("env_families", []), but=request.get("env_passed", [])),
    }


def pack_path(digest: str, places: list[str], workdir: str) -> str | None:
    """Return the place of the data pack with this digest; None if it isn't there, or without a digest."""
    folders = [*places, os.path.join(workdir, "data", digest)] if digest else []
    return next((folder for folder in folders if holds_pack(folder, digest)), None)


def in_container(wanted: Json, workdir: str, names: list[str], python_path: list[str]) -> tuple[Json, Json]:
    """Return the ranks' container, and the software of its image. Raises SystemExit: there can't be one here."""
    box = container.find_image(wanted, workdir)
    return box, container.software_in(box, wanted, names, python_path)


def probe(request: Json, answer: Callable[..., object] = say) -> None:
    """Return the facts for a launch as one JSON object, with the field names of NodeFacts."""
    began = time.time()
    if request.get("warm"):
        warm_up(request["env_passed"], request["warm"])
    address, port = address_and_port(request)
    holding, ports = interfaces(), free_ports(4)
    workdir = os.path.expanduser(request["workdir"])
    leftovers = tidy_workdir(request, workdir)
    wanted, names, python_path = request.get("container"), request.get("modules", []), request.get("python_path", [])
    used, there = in_container(wanted, workdir, names, python_path) if wanted else (None, software(names, python_path))
    answer(
        identity=identity(request),
        hostname=socket.gethostname(),
        address=address,
        interface=holding.get(address),
        python=there["python"],
        python_version=there["python_version"],
        torch_version=there["torch_version"],
        gpus=count_gpus(),
        cpus=count_cpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_free_bytes=free_bytes(workdir),
        free_port=ports[0],
        home=os.path.expanduser("~"),
        unix_time=time.time(),
        pack_path=pack_path(request.get("pack_digest", ""), request.get("pack_places", []), workdir),
        extra={
            "ssh_port": port,
            "ssh_address": address,
            "free_ports": ports,
            "interfaces": holding,
            **login(request),
            "packages": there["packages"],
            "modules": there["modules"],
            "container": used,
            "hardware": hardware(),
            "left": leftovers,
            "numa": not wanted and numa(),  # numactl would have to be in the image, and may not bind memory there
            "torch_cuda": there["torch_cuda"],
            "system": facts(request.get("gpu_s", 0.0)),
            "began": began,
        },
    )


# Facts for preflight: limits of the login, memory, clock, network devices. Read from files, but for one name.


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
    match = re.search(r"^MemAvailable:\s*(\d+) kB", read_text(table), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def cgroup(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Json:
    """Return the limits of this process's control groups: cores, bytes of memory, and the bytes in use.

    The tightest limit up to the root counts; null without one. Reads versions 1 and 2 of Linux' interface.
    """
    places = control_groups(own)
    cpus, memory = [], []
    for folder in ancestors(root, places.get("")):
        quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
        cpus += [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []
        memory += limit_and_use(folder, "memory.max", "memory.current")
    for folder in ancestors(f"{root}/cpu", places.get("cpu")):
        quota, period = read_text(f"{folder}/cpu.cfs_quota_us"), read_text(f"{folder}/cpu.cfs_period_us")
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
    most, used = read_text(f"{folder}/{limit}"), read_text(f"{folder}/{use}")
    if not (most.isdecimal() and used.isdecimal() and int(most) < 1 << 60):
        return []
    counters: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", read_text(f"{folder}/memory.stat"), re.MULTILINE))
    idle = int(counters.get("total_inactive_file", counters.get("inactive_file", "0")))
    return [(int(most), max(0, int(used) - idle))]


def links(root: str = "/sys/class/net") -> Json:
    """Return interface → state (``up``, ``down``, ``unknown``), MTU, and Mbit/s if the driver reports it."""
    interfaces = {}
    for folder in glob.glob(f"{root}/*/"):
        speed = read_text(f"{folder}speed")  # an error, or -1, while the link is down
        interfaces[os.path.basename(folder[:-1])] = {
            "state": read_text(f"{folder}operstate") or "unknown",
            "mtu": number(read_text(f"{folder}mtu")),
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
                "state": read_text(f"{folder}/state").partition(": ")[2],
                "phys_state": read_text(f"{folder}/phys_state").partition(": ")[2],
                "rate": read_text(f"{folder}/rate"),
                "link_layer": read_text(f"{folder}/link_layer"),
                "gid": read_text(f"{folder}/gids/0"),
                "netdev": netdev_of(device, folder, port),
            }
        )
    return ports


def netdev_of(device: str, folder: str, port: str) -> str | None:
    """Return the network interface of an RDMA port, by its first GID, else by the port number."""
    named = read_text(f"{folder}/gid_attrs/ndevs/0")
    if named:
        return named
    for place in sorted(glob.glob(f"{device}/device/net/*")):
        index = read_text(f"{place}/dev_port") or "0"
        if index.isdecimal() and int(index) + 1 == number(port):
            return os.path.basename(place)
    return None


def number(digits: str) -> int | None:
    return int(digits) if digits.isdecimal() else None
