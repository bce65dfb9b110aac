"""A host's own name, its link and its InfiniBand ports. Pure. ``networks`` checks whether hosts reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from pipeline.cluster.preflight.judgement import Check, State, compared, judged
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
    # of the interface that the collectives use
    all_links = {fact.host: fact.extra.get("system", {}).get("links", {}).get(fact.interface) for fact in facts}
    links = {host: link for host, link in all_links.items() if link}
    where = {fact.host: f" on {fact.interface}" for fact in facts}
    for host, link in links.items():
        is_up = link["state"] in ("up", "unknown")  # a loopback or a tunnel has no state
        hint = "sudo ip link set dev INTERFACE up there, or another interface by cluster.hosts[].interface"
        yield judged(host, "link", f"{link['state']}{where[host]}", is_up, wanted="up", hint=hint)
    mtus = {host: str(link["mtu"]) for host, link in links.items() if link["mtu"]}
    hint = "sudo ip link set dev INTERFACE mtu N: packets larger than the smallest on the way get lost"
    yield from compared("MTU", mtus, state=State.WARNING, hint=hint, where=where)
    speeds = {host: f"{link['speed_mbit']} Mbit/s" for host, link in links.items() if link["speed_mbit"]}
    hint = "check its cable and the switch's port (ethtool INTERFACE): the slowest link sets the pace of all"
    yield from compared("link speed", speeds, state=State.WARNING, hint=hint, where=where)
    yield from _infiniband(facts)


def _own_name(fact: NodeFacts) -> Iterator[Check]:
    """Check the host's own name: without a configured interface, gloo and NCCL use its address."""
    name = fact.extra.get("system", {}).get("own_name")
    if name is None:
        return
    hint = f"a line '{fact.address} {fact.hostname}' in its /etc/hosts, in place of 127.0.1.1"
    if "slow_s" in name:
        seen = f"{fact.hostname} isn't resolved within {name['slow_s']:g} s, for which torchrun waits several times"
        yield judged(fact.host, "host name", seen, False, wanted=f"{fact.address} at once", hint=hint)
        return
    addresses, has_interface = name["addresses"], bool(fact.interface or fact.extra.get("env"))
    # Debian's installer maps the host's name to 127.0.1.1, which gloo would announce to the other hosts
    looped = bool(addresses) and all(
        ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses
    )
    is_ok = not looped if addresses else has_interface
    unresolved = "not resolved, and need not be" if is_ok else "not resolved"
    yield judged(
        fact.host,
        "host name",
        f"{fact.hostname} is {', '.join(addresses) or unresolved}{'' if is_ok else ' there'}",
        is_ok,
        wanted=f"{fact.address}, where the other hosts reach it",
        hint=hint if has_interface else f"{hint}, or cluster.interface=",
        otherwise=State.WARNING if has_interface else State.FAILED,
    )


def _infiniband(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    active, rates = {}, {}
    for fact in facts:
        ports = fact.extra.get("system", {}).get("infiniband", [])
        for port in ports:
            netdev = f", {port['netdev']}" if port["netdev"] else ""
            state = f"{port['state']} ({port['phys_state']}), {port['rate']}, {port['link_layer']}{netdev}"
            seen, is_active = f"{port['device']} port {port['port']} is {state}", port["state"] == "ACTIVE"
            hint = _PORT_HINTS.get(port["state"]) or _PORT_HINTS.get(port["phys_state"], "ibstatus there")
            yield judged(fact.host, "InfiniBand", seen, is_active, wanted="ACTIVE", hint=hint)
        running = [port for port in ports if port["state"] == "ACTIVE"]
        if ports:
            active[fact.host] = counted(len(running), "active port")
        if running:
            rates[fact.host] = min(port["rate"] for port in running)
    hint = "ibstatus on both hosts shows the difference"
    yield from compared("InfiniBand", active, state=State.WARNING, hint=hint)
    yield from compared("InfiniBand rate", rates, state=State.WARNING, hint=hint)
