"""The host's facts that a launch depends on. No installed package is imported."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable

from ..node import address_and_port, from_environment, identity, machine
from ..reasons import free_bytes
from ..running.leftovers import tidy_workdir
from ..running.processes import LINUX
from ..running.staging import holds_pack
from ..running.warm import warm_up
from ..wire import Json, say
from . import container
from .checks import facts, text
from .processors import count_cpus, count_gpus, hardware
from .software import software


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
        folders = [os.path.dirname(path) for path in vendors if text(path) == "0x10de"]
        nodes = {text(os.path.join(folder, "numa_node")) for folder in folders}
        cores = [cores_of(text(f"{system}/devices/system/node/node{node}/cpulist")) for node in nodes]
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
    box = container.look(wanted, workdir)
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
