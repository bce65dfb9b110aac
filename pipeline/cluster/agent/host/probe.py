"""Answer a ``ProbeRequest``: collect the facts of this host (``HostFacts``), for launches and `doit preflight`.

The probe takes a fraction of a second, so slow things go on in the background: the import of torch in a warm parent,
and the look-up of the host's own name.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from trainers.contract.host_facts import Container, HostFacts, InfinibandPort, NetworkLink, OwnName, ProbeTimes
from trainers.contract.records import as_json

from ..files.folders import holds_pack
from ..files.leftovers import tidy_workdir
from ..node import address_and_port, from_environment, identity, machine, read_text
from ..requests import ProbeRequest
from ..running.claims import claims_here
from ..running.processes import LINUX
from ..running.warm import warm_up
from ..wire import Json, free_bytes, in_thread, say
from . import container, hardware, usage
from .reach import encoded_name
from .software import software


def probe(request: ProbeRequest) -> None:
    """Answer with the facts for a launch, in the fields of ``HostFacts`` but for ``host``."""
    say(**as_json(facts(request)))


def facts(request: ProbeRequest) -> HostFacts:
    """Return this host's facts. Raises SystemExit: it has no container image, or no folder that can be written to."""
    began = time.time()
    if request.warm is not None:
        warm_up(request.env_passed, request.warm)
    own_name = OwnNameLookup()
    address, _ = address_and_port(request.access)
    by_address = interfaces()
    workdir = os.path.expanduser(request.workdir)
    left_folders = tidy_workdir(request, workdir)
    ranks_container, ranks_software = software_of_ranks(request, workdir)
    return HostFacts(
        host="",
        identity=identity(request.access),
        hostname=socket.gethostname(),
        address=address,
        home=os.path.expanduser("~"),
        **ranks_software,
        container=ranks_container,
        cpus=hardware.count_cpus(),
        gpus=hardware.count_gpus(),
        hardware=hardware.hardware(),
        # torchrun binds by numactl, which an image needn't have, and which may not bind memory in a container
        can_bind_numa=ranks_container is None and hardware.can_bind_numa(),
        nvidia_smi=usage.nvidia_smi(request.gpu_s) if request.gpu_s else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_available_bytes=hardware.memory_available_bytes(),
        shared_memory_free_bytes=hardware.shared_memory_free_bytes(),
        disk_free_bytes=free_bytes(workdir),
        control_group=hardware.control_group(),
        limits=hardware.limits(),
        interface=by_address.get(address),
        ssh_address=address,
        interfaces=by_address,
        links=links(),
        infiniband=infiniband(),
        own_name=own_name.result(),
        free_ports=free_ports(4),
        machine=machine(),
        network_variables=from_environment(request.env_names),
        not_passed=from_environment(request.env_families, excluded=request.env_passed),
        claims=claims_here(),
        left_folders=left_folders,
        pack_path=pack_path(request.pack_digest, request.pack_folders, workdir),
        times=ProbeTimes(host_began=began, host_ended=time.time()),
    )


def software_of_ranks(request: ProbeRequest, workdir: str) -> tuple[Container | None, Json]:
    """Return the container of the ranks (None: they run without one), and their interpreter's software."""
    requested = request.container
    if requested is None:
        return None, software(request.modules, request.python_path)
    image = container.find_image(requested.image, workdir, gpus=requested.gpus, mounts=requested.mounts)
    return image, container.software_in(image, requested.image, request.modules, request.python_path)


def pack_path(digest: str, folders: Sequence[str], workdir: str) -> str | None:
    """Return the first folder that holds the data pack with this digest; None if none does, or without a digest."""
    candidates = [*folders, os.path.join(workdir, "data", digest)] if digest else []
    return next((folder for folder in candidates if holds_pack(folder, digest)), None)


NAME_S = 1.0  # limit for the look-up of the host's own name
_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """Return address → interface, for all addresses of this node (Linux; elsewhere empty)."""
    by_address: dict[str, str] = {}
    if not LINUX:
        return by_address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # interfaces without an IPv4 address
                interface_request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, interface_request)
                by_address[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            by_address[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return by_address


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that no program listens on. All are held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return tuple(int(listener.getsockname()[1]) for listener in listeners)


class OwnNameLookup:
    """Resolves this host's own name as programs here do, in a thread, because a name server may not answer."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._is_over = threading.Event()
        in_thread(self._resolve, on_error=lambda _: self._is_over.set())

    def _resolve(self) -> None:
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(encoded_name(socket.gethostname()), None, type=socket.SOCK_STREAM)
            self._addresses = tuple(sorted({str(address[0]) for *_, address in answers}))
        self._is_over.set()

    def result(self) -> OwnName:
        return OwnName(addresses=self._addresses) if self._is_over.wait(NAME_S) else OwnName(slow_s=NAME_S)


def links(root: str = "/sys/class/net") -> dict[str, NetworkLink]:
    by_name = {}
    for folder in glob.glob(f"{root}/*/"):
        by_name[os.path.basename(folder[:-1])] = NetworkLink(
            state=read_text(f"{folder}operstate") or "unknown",
            mtu=_number(read_text(f"{folder}mtu")),
            speed_mbit=_number(read_text(f"{folder}speed")),  # an error, or -1, while the link is down
        )
    return by_name


def infiniband(root: str = "/sys/class/infiniband") -> tuple[InfinibandPort, ...]:
    ports = []
    for folder in sorted(glob.glob(f"{root}/*/ports/*")):
        device = os.path.dirname(os.path.dirname(folder))
        number = _number(os.path.basename(folder))
        ports.append(
            InfinibandPort(
                device=os.path.basename(device),
                port=number,
                state=read_text(f"{folder}/state").partition(": ")[2],
                phys_state=read_text(f"{folder}/phys_state").partition(": ")[2],
                rate=read_text(f"{folder}/rate"),
                link_layer=read_text(f"{folder}/link_layer"),
                netdev=read_text(f"{folder}/gid_attrs/ndevs/0") or _netdev_by_port(device, number),
            )
        )
    return tuple(ports)


def _netdev_by_port(device: str, port: int | None) -> str | None:
    """Return the network interface of a port whose first GID names none."""
    for folder in sorted(glob.glob(f"{device}/device/net/*")):
        index = _number(read_text(f"{folder}/dev_port") or "0")
        if index is not None and index + 1 == port:
            return os.path.basename(folder)
    return None


def _number(digits: str) -> int | None:
    return int(digits) if digits.isdecimal() else None
