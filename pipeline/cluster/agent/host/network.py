"""The network of this host: its addresses, interfaces, ports, InfiniBand devices, and its own name."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import socket
import struct
import threading

from trainers.contract.host_facts import InfinibandPort, NetworkLink, OwnName

from ..node import read_text
from ..running.processes import LINUX
from ..wire import in_thread
from .reach import encoded_name

NAME_S = 1.0  # limit for the look-up of the host's own name
_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """Return every address of this node with its interface (Linux; elsewhere empty)."""
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
    """Return TCP ports that no program uses at the moment."""
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
        """Wait for the answer, at most ``NAME_S``."""
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
    """Return each port of each RDMA device, as ibstatus and ibdev2netdev show it."""
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
