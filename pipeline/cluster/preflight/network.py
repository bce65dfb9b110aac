"""A host's own name, its link and its InfiniBand ports. Pure. ``networks`` checks whether hosts reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.cluster.preflight.judgement import Check, State, compared
from pipeline.core.specs import Cluster, NodeFacts
from pipeline.core.tables import counted

_PORT_HINTS = {
    "INIT": "start the fabric's subnet manager (opensm)",
    "ARMED": "start the fabric's subnet manager (opensm)",
    "Polling": "check its cable and the switch's port",
    "Disabled": "ibportstate -D 0 PORT enable there",
    "Sleep": "check its cable and the switch's port",
}


def checks(cluster: Cluster, facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Check the hosts of clusters with more than one node; a single node needs no network."""
    if cluster.nnodes < 2:
        return
    for fact in facts:
        yield from _own_name(fact)
    links = {fact.host: link for fact in facts if (link := _link(fact))}
    where = {fact.host: f" on {fact.interface}" for fact in facts}
    for host, link in links.items():
        yield _up(host, link["state"], where[host])
    mtus = {host: str(link["mtu"]) for host, link in links.items() if link["mtu"]}
    hint = "sudo ip link set dev INTERFACE mtu N: what is larger than the smallest on the way gets lost"
    yield from compared("MTU", mtus, state=State.WARNING, hint=hint, where=where)
    speeds = {host: f"{link['speed_mbit']} Mbit/s" for host, link in links.items() if link["speed_mbit"]}
    hint = "check its cable and the switch's port (ethtool INTERFACE): the slowest link sets the pace of all"
    yield from compared("link speed", speeds, state=State.WARNING, hint=hint, where=where)
    yield from _infiniband(facts)


def _own_name(fact: NodeFacts) -> Iterator[Check]:
    """Check the host's name: without a configured interface gloo and NCCL take the address of that name."""
    name = fact.extra.get("system", {}).get("own_name")
    if name is None:
        return
    has_interface = bool(fact.interface or fact.extra.get("env"))
    if "slow_s" in name:
        yield Check(
            host=fact.host,
            name="host name",
            state=State.WARNING,
            seen=f"{fact.hostname} isn't resolved within {name['slow_s']:g} s, for which torchrun waits several times",
            wanted=f"{fact.address} at once",
            hint=_in_hosts(fact),
        )
        return
    addresses = name["addresses"]
    # Debian's installer maps the own name to 127.0.1.1, which gloo would announce to the other hosts
    looped = bool(addresses) and all(_is_loopback(address) for address in addresses)
    if (addresses and not looped) or (has_interface and not addresses):
        seen = f"{fact.hostname} is {', '.join(addresses) or 'not resolved, and need not be'}"
        yield Check(host=fact.host, name="host name", state=State.OK, seen=seen)
        return
    yield Check(
        host=fact.host,
        name="host name",
        state=State.WARNING if has_interface else State.FAILED,
        seen=f"{fact.hostname} is {', '.join(addresses) or 'not resolved'} there",
        wanted=f"{fact.address}, where the other hosts reach it",
        hint=_in_hosts(fact) + ("" if has_interface else ", or cluster.interface="),
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _in_hosts(fact: NodeFacts) -> str:
    return f"a line '{fact.address} {fact.hostname}' in its /etc/hosts, in place of 127.0.1.1"


def _link(fact: NodeFacts) -> Mapping[str, Any] | None:
    """Return the link of the interface that the collectives use."""
    link: Mapping[str, Any] | None = fact.extra.get("system", {}).get("links", {}).get(fact.interface)
    return link


def _up(host: str, state: str, where: str) -> Check:
    is_up = state in ("up", "unknown")  # a loopback or a tunnel has no state
    return Check(
        host=host,
        name="link",
        state=State.OK if is_up else State.WARNING,
        seen=f"{state}{where}",
        wanted="" if is_up else "up",
        hint="" if is_up else "sudo ip link set dev INTERFACE up there, or another one by cluster.hosts[].interface",
    )


def _infiniband(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    active, rates = {}, {}
    for fact in facts:
        ports = fact.extra.get("system", {}).get("infiniband", [])
        for port in ports:
            yield _port(fact.host, port)
        running = [port for port in ports if port["state"] == "ACTIVE"]
        if ports:
            active[fact.host] = counted(len(running), "active port")
        if running:
            rates[fact.host] = min(port["rate"] for port in running)
    hint = "ibstatus on both hosts shows the difference"
    yield from compared("InfiniBand", active, state=State.WARNING, hint=hint)
    yield from compared("InfiniBand rate", rates, state=State.WARNING, hint=hint)


def _port(host: str, port: Mapping[str, Any]) -> Check:
    name = f"{port['device']} port {port['port']}"
    netdev = f", {port['netdev']}" if port["netdev"] else ""
    is_active = port["state"] == "ACTIVE"
    hint = _PORT_HINTS.get(port["state"]) or _PORT_HINTS.get(port["phys_state"], "ibstatus there")
    return Check(
        host=host,
        name="InfiniBand",
        state=State.OK if is_active else State.WARNING,
        seen=f"{name} is {port['state']} ({port['phys_state']}), {port['rate']}, {port['link_layer']}{netdev}",
        wanted="" if is_active else "ACTIVE",
        hint="" if is_active else hint,
    )
