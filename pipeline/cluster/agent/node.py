"""What the agent knows of the node that it runs on: address, identity, environment, and the node's part of a request.

The identity is a text (host name, ssh server, user) that is equal for all names by which a controller reaches a node.
A request lists all nodes, and each agent finds the one with its own identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import socket
import time
from collections.abc import Sequence
from typing import BinaryIO

from trainers.contract import run_folder

from .requests import Access, NodeStart

PEERS = 3  # how many other nodes a cut-off node tries to reach; each takes a second if it doesn't answer
SETTLED_S = 2.0  # a script's checkpoint counts as complete if nothing was written to it for this time
RANK_OUTPUTS = "ranks/*/attempt_*/*/std*.log"
"""What ranks print, in a node's state folder: a file for each stream."""


def server_address(access: Access) -> tuple[str, int]:
    """Return address and port on which ssh reached this node; 127.0.0.1 and 0 without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()  # client address, client port, server address, server port
    if access.is_local or len(parts) != 4:
        return "127.0.0.1", 0
    return parts[2].partition("%")[0], int(parts[3])  # without the scope of an IPv6 address


def address_and_port(access: Access) -> tuple[str, int]:
    """Return where other nodes reach this one: its ssh server, or its address alone without ssh."""
    address, port = server_address(access)
    return (address if port else address_towards(access.host_names) or address), port


def address_towards(names: Sequence[str]) -> str | None:
    """Return this node's own address towards the other ones of ``names``; None if no name leads to another node."""
    for name in names:
        with contextlib.suppress(OSError):
            own_address, other_address = route_to(name)
            if own_address != other_address:
                return own_address
    return None


def route_to(name: str) -> tuple[str, str]:
    """Return this node's own address towards the host ``name``, and the address of that host. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(name, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe_socket:
        probe_socket.connect(address)  # for UDP this only chooses the route: no packet is sent
        return str(probe_socket.getsockname()[0]), str(address[0])


def identity(access: Access) -> str:
    """Return host name, ssh server and user: equal for all names by which the controller reaches this login."""
    if access.identity:  # of a node in a scheduler's job
        return access.identity
    address, port = server_address(access)
    return f"{socket.gethostname()} {address}:{port} uid {os.getuid()}"


def machine() -> str | None:
    """Return a text that is equal for all logins that lead to one computer or container; None: not Linux."""
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        # containers of one computer share its boot id, but have namespaces of their own
        parts += [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid")]
    except OSError:
        return None
    parts.append(read_text("/etc/machine-id"))
    return hashlib.sha256(" ".join(filter(None, parts)).encode()).hexdigest()[:16]


def sha256_of_rest(file: BinaryIO) -> str:
    """Return the hexadecimal digest of an open file from its current position on."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def read_text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


def control_groups(cgroup_file: str = "/proc/self/cgroup") -> dict[str, str]:
    """Return controller ('' in version 2) → the path of this process's control group below that hierarchy."""
    rows = [line.split(":", 2) for line in read_text(cgroup_file).splitlines()]  # number, names of controllers, path
    return {name: path for _, names, path in rows for name in names.split(",")}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def peers_of(node: NodeStart, nodes: Sequence[NodeStart]) -> list[tuple[str, int]]:
    """Return ssh address and port of the next ``PEERS`` nodes in rank order; without nodes that have no ssh server."""
    number = [other.identity for other in nodes].index(node.identity)
    peers = []
    for other in [*nodes[number + 1 :], *nodes[:number]][:PEERS]:
        address, _, port = other.identity.split(" ")[1].rpartition(":")
        if port != "0":
            peers.append((address, int(port)))
    return peers


def from_environment(patterns: Sequence[str], excluded: Sequence[str] = ()) -> dict[str, str]:
    """Return this process's variables that match a pattern (``NAME`` or ``PREFIX*``), but none of ``excluded``."""

    def matches(name: str, wanted: Sequence[str]) -> bool:
        return any(name.startswith(entry[:-1]) if entry.endswith("*") else name == entry for entry in wanted)

    return {
        name: value for name, value in os.environ.items() if matches(name, patterns) and not matches(name, excluded)
    }


def own_number(identities: Sequence[str], access: Access) -> int:
    """Return this node's position in a list of identities. Raises SystemExit: it isn't there."""
    own_identity = identity(access)
    if own_identity not in identities:
        raise SystemExit(f"this node is {own_identity!r}, which the plan does not name")
    return identities.index(own_identity)


def own_node(nodes: Sequence[NodeStart], access: Access) -> NodeStart:
    return nodes[own_number([node.identity for node in nodes], access)]


def newest_write_ms(run_dir: str) -> int:
    """Return when a script last wrote to its checkpoints, in unix ms; 0: there are none, or it may still be writing."""
    newest = 0.0
    for folder, _, names in os.walk(os.path.join(run_dir, run_folder.CHECKPOINTS)):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    is_settled = newest and time.time() - newest > SETTLED_S
    return int(newest * 1000) + 1 if is_settled else 0  # rounded up: files up to this time are fetched
