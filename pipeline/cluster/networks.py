"""Over which of a host's networks its ranks speak. Pure.

What the configuration says comes first; else the hosts' InfiniBand where every host has it, as NCCL chooses too; else
the network on which ssh reached them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.core.specs import Host, NodeFacts


def address_and_interface(host: Host, seen: str, interfaces: Mapping[str, str]) -> tuple[str, str | None]:
    """Where the other hosts reach this one, and the interface that holds the address (None: not known).

    Args:
        seen: the address on which ssh reached it.
        interfaces: address → interface, as its probe tells.
    """
    if host.address is not None or host.interface is None:
        address = host.address or seen
        return address, host.interface or interfaces.get(address)
    held = by_interface(interfaces).get(host.interface, [])
    return (seen if seen in held or not held else held[0]), host.interface


def by_interface(interfaces: Mapping[str, str]) -> dict[str, list[str]]:
    """Interface → the addresses at which another host may reach it, IPv4 first, as gloo takes them."""
    found: dict[str, list[str]] = defaultdict(list)
    for address, name in sorted(interfaces.items(), key=lambda item: ":" in item[0]):
        if not _is_loopback(address) and not address.startswith(("169.254.", "fe80:")):
            found[name].append(address)
    return dict(found)


def not_its_own(fact: NodeFacts) -> bool:
    """Whether the configuration tells an IP address that no interface of the host has. (Where that is a NAT's, the
    others reach it there.)"""
    interfaces: Mapping[str, str] = fact.extra.get("interfaces", {})
    if not interfaces or fact.address in interfaces or fact.address == fact.extra.get("ssh_address"):
        return False
    return fact.address.replace(".", "").isdecimal() or ":" in fact.address  # a name is looked up by each host


def absent_interface(host: Host, fact: NodeFacts) -> list[str]:
    """What is wrong with the interface that the configuration names; what the host has instead."""
    interfaces: Mapping[str, str] = fact.extra.get("interfaces", {})
    if host.interface is None or not interfaces or host.interface in interfaces.values():
        return []
    return [f"it has no interface {host.interface!r} with an address; {_has_instead(interfaces)}"]


def loopback_interface(host: Host, fact: NodeFacts) -> list[str]:
    """What is wrong, among several hosts, with an interface whose addresses only the host itself reaches."""
    interfaces: Mapping[str, str] = fact.extra.get("interfaces", {})
    held = [address for address, name in interfaces.items() if name == host.interface]
    if not held or not all(_is_loopback(address) for address in held):
        return []
    return [
        f"its interface {host.interface!r} has only {' and '.join(held)}, where no other host reaches it; "
        f"{_has_instead(interfaces)}"
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _has_instead(interfaces: Mapping[str, str]) -> str:
    has = "; ".join(f"{name} ({', '.join(held)})" for name, held in by_interface(interfaces).items())
    return (
        f"it has {has or 'none but the loopback'}: set cluster.interface, or interface: of its entry in cluster.hosts"
    )


def others(facts: Sequence[NodeFacts]) -> dict[str, list[str]]:
    """Interfaces that all hosts have beside the ones in use → their addresses, which no two hosts share (as they
    share a bridge's for containers)."""
    found: dict[str, list[str]] = {}
    held = [by_interface(fact.extra.get("interfaces", {})) for fact in facts]
    for name in sorted(set(held[0]).intersection(*held[1:])):
        addresses = [there[name][0] for there in held]
        if len(set(addresses)) == len(facts) and not any(fact.interface == name for fact in facts):
            found[name] = addresses
    return found


def active_infiniband(fact: NodeFacts) -> list[Mapping[str, Any]]:
    """The host's InfiniBand ports that are up."""
    ports = fact.extra.get("system", {}).get("infiniband", [])
    return [port for port in ports if port.get("state") == "ACTIVE" and port.get("link_layer") == "InfiniBand"]


def nccl_devices(facts: Sequence[NodeFacts]) -> list[str | None]:
    """NCCL_IB_HCA of each host, its active InfiniBand ports by their whole names; None where not all hosts have one."""
    ports = [active_infiniband(fact) for fact in facts]
    if not all(ports):
        return [None for _ in facts]
    return ["=" + ",".join(f"{port['device']}:{port['port']}" for port in there) for there in ports]


def over_infiniband(hosts: Sequence[Host], facts: Sequence[NodeFacts]) -> list[NodeFacts] | None:
    """The facts with the addresses of the hosts' InfiniBand, where all have one and the configuration chose nothing."""
    if len(hosts) < 2 or any(host.address or host.interface for host in hosts):
        return None
    moved = []
    for fact in facts:
        held = by_interface(fact.extra.get("interfaces", {}))
        names = [port["netdev"] for port in active_infiniband(fact) if port.get("netdev") in held]
        if not names:
            return None
        moved.append(replace(fact, interface=names[0], address=held[names[0]][0]))
    return moved if [fact.address for fact in moved] != [fact.address for fact in facts] else None


def loopback(fact: NodeFacts) -> dict[str, str]:
    """The loopback as environment, for ranks that share one host: whatever the host itself has set, no other host
    reaches them there. Empty where the interfaces aren't known (macOS)."""
    interfaces: Mapping[str, str] = fact.extra.get("interfaces", {})
    name = next((name for address, name in interfaces.items() if _is_loopback(address)), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def variables(host: Host, fact: NodeFacts, nccl_devices: str | None, state_dir: str) -> dict[str, str]:
    """The interface for gloo and NCCL, and NCCL's InfiniBand ports, as environment; what the host itself has set stays.

    An interface that the configuration names goes before the host's own. Where NCCL is given InfiniBand ports, it logs
    which network it takes (``trainers/distributed/nccl.py`` reads that), unless somebody has set up its log.
    """
    already = fact.extra.get("env", {})
    env = {}
    if fact.interface is not None:
        chosen = {"GLOO_SOCKET_IFNAME": fact.interface, "NCCL_SOCKET_IFNAME": f"={fact.interface}"}  # '=': whole name
        env = {name: value for name, value in chosen.items() if host.interface or name not in already}
    if nccl_devices is not None and "NCCL_IB_HCA" not in already:
        env["NCCL_IB_HCA"] = nccl_devices
        if not any(name.startswith("NCCL_DEBUG") for name in (*already, *host.env)):
            env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG_FILE": f"{state_dir}/nccl.%p"}
    return env
