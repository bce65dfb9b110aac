"""Whether all hosts reach each other over TCP: what the agents are asked, and what their answers mean. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.cluster import networks
from pipeline.cluster.agent.addresses import UNRESOLVED
from pipeline.cluster.agent.reach import LOST
from pipeline.core.errors import HostError
from pipeline.core.specs import NodeFacts

_LONGEST_LIST = 10  # lines
_NAMED = 3  # hosts in a line


@dataclass(frozen=True, kw_only=True)
class Unreached:
    """``source`` can't connect to ``target`` (indices of hosts) at ``port``."""

    source: int
    target: int
    port: int
    why: str


def nodes(facts: Sequence[NodeFacts]) -> list[dict[str, Any]]:
    """Who listens where: node 0 at each port at which its ranks may meet, every other host at one."""
    return [
        {"identity": fact.identity, "address": fact.address, "ports": _ports(fact)[: None if fact is facts[0] else 1]}
        for fact in facts
    ]


def _ports(fact: NodeFacts) -> list[int]:
    return list(fact.extra.get("free_ports", [fact.free_port]))


def unreached(answers: Sequence[Mapping[str, Any]]) -> list[Unreached]:
    """What failed, from the answers of all hosts in their order. A port that another program took meanwhile proves
    nothing: whoever needs it will say so."""
    taken = [{int(port) for port in answer.get("taken", {})} for answer in answers]
    return [
        Unreached(source=source, target=item["node"], port=item["port"], why=item["why"])
        for source, answer in enumerate(answers)
        for item in answer.get("failed", [])
        if item["port"] not in taken[item["node"]]
    ]


def error(failures: Sequence[Unreached], facts: Sequence[NodeFacts]) -> HostError:
    """Each host that can't be reached, by whom, at which address and how that failed; and what mends it."""
    ports: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for item in failures:
        ports[item.source, item.target, _named(item.why, facts)].append(item.port)
    sources: dict[tuple[int, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (source, target, why), found in ports.items():
        sources[target, why, tuple(found)].append(source)
    rows = [_row(target, why, found, who, facts) for (target, why, found), who in sources.items()]
    more = len(rows) - _LONGEST_LIST
    rows = [*rows[:_LONGEST_LIST], *([f"  and {more} more like these"] if more > 0 else [])]
    head = "the hosts can't all connect to each other over TCP, so their ranks would wait for each other in vain:"
    unresolved = [item for item in failures if item.why.startswith(UNRESOLVED)]
    foreign = next((fact for item in failures if networks.not_its_own(fact := facts[item.target])), None)
    hint = (
        _mend_name(unresolved[0], facts)
        if unresolved
        else _mend_address(foreign)
        if foreign is not None
        else _mend(failures[0], facts)
    )
    return HostError("\n".join([head, *rows]), hint=hint)


def _named(why: str, facts: Sequence[NodeFacts]) -> str:
    """``node 1 answers there`` with the host's name."""
    first, _, rest = why.partition(" ")
    number, _, rest = rest.partition(" ")
    return f"{facts[int(number)].host} {rest}" if first == "node" and number.isdecimal() else why


def _row(target: int, why: str, ports: Sequence[int], sources: Sequence[int], facts: Sequence[NodeFacts]) -> str:
    names = [facts[source].host for source in sources]
    who = " and ".join(names) if len(names) <= _NAMED else f"{', '.join(names[:2])} and {len(names) - 2} more"
    if why.startswith(UNRESOLVED):
        whose = "its own" if list(sources) == [target] else f"{facts[target].host}'s"
        return f"  {who} can't resolve {whose} address {facts[target].address!r}: {why.removeprefix(UNRESOLVED)}"
    over = {interface for source in sources if (interface := facts[source].interface)}
    where = _at(facts[target].address, ports) + (f" over {' or '.join(sorted(over))}" if over else "")
    return f"  {who} can't reach {facts[target].host} ({where}): {why}"


def _at(address: str, ports: Sequence[int]) -> str:
    if len(ports) > 1:
        return f"{address}, ports {', '.join(map(str, ports))}"
    return f"[{address}]:{ports[0]}" if ":" in address else f"{address}:{ports[0]}"


def _mend_name(failure: Unreached, facts: Sequence[NodeFacts]) -> str:
    target = facts[failure.target]
    seen = target.extra.get("ssh_address")
    instead = f" for {seen}, where ssh reached it" if seen else ""
    return (
        f"address: of {target.host}'s entry in cluster.hosts is an IP address or a name that every host can look up; "
        f"leave it out{instead}, or put the name into /etc/hosts of every host"
    )


def _mend_address(fact: NodeFacts) -> str:
    held = networks.by_interface(fact.extra["interfaces"]).items()
    has = ", ".join(f"{', '.join(addresses)} ({name})" for name, addresses in held)
    return (
        f"cluster.hosts says that {fact.host} has the address {fact.address}; it has {has}: write one of them as "
        "address: of its entry, or leave address: out"
    )


def _mend(failure: Unreached, facts: Sequence[NodeFacts]) -> str:
    """Another network where every host has one, else another address; and the firewall's rule."""
    source, target = facts[failure.source], facts[failure.target]
    if failure.why == LOST:
        device = source.interface or target.interface or "INTERFACE"
        return (
            f"tracepath -n {target.address} on {source.host} shows where; sudo ip link set dev {device} mtu 1400 on "
            "both, or what that shows; or let ICMP's 'fragmentation needed' through the firewalls between them"
        )
    tool = "ip6tables" if ":" in source.address else "iptables"
    rule = f"sudo {tool} -I INPUT -p tcp -s {source.address} -j ACCEPT"
    firewall = f"let TCP between the hosts through, at every port (on {target.host}: {rule}, and so on)"
    others = networks.others(facts)
    if others:
        names = [f"cluster.interface={shlex.quote(name)} ({', '.join(found)})" for name, found in others.items()]
        return f"{' or '.join(names)}; or {firewall}"
    for fact in (target, source):  # the configuration has chosen another one for it
        if (seen := fact.extra.get("ssh_address")) not in (None, fact.address):
            return f"without address: and interface: of {fact.host} it is {seen}, where ssh reached it; or {firewall}"
    entries = ", ".join(f"{{name: {fact.host}, address: ADDRESS}}" for fact in facts[:2])
    rest = ", …" if len(facts) > 2 else ""
    return f"{firewall}; or name addresses of another network: cluster.hosts='[{entries}{rest}]'"
