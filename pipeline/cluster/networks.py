"""Choose the network of the ranks (addresses, interfaces, InfiniBand), and explain hosts that can't connect. Pure.

``plan.py`` gets the variables of gloo and NCCL here. The second part is for the check in which all hosts connect to
each other before a launch (``agent/host/reach.py``).
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.cluster.agent.requests import ListeningNode
from pipeline.cluster.agent.wire import LARGE_LOST, UNRESOLVED
from pipeline.core.errors import HostError
from pipeline.core.specs import Host
from trainers.contract.host_facts import HostFacts, InfinibandPort


def address_and_interface(host: Host, ssh_address: str, interfaces: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the address at which other hosts reach this one, and its interface (None: not known).

    ``ssh_address``: the address at which ssh reached the host. ``interfaces``: address → interface, from its probe.
    """
    if host.address is not None or host.interface is None:
        address = host.address or ssh_address
        return address, host.interface or interfaces.get(address)
    on_interface = by_interface(interfaces).get(host.interface, [])
    if ssh_address in on_interface or not on_interface:
        return ssh_address, host.interface
    return on_interface[0], host.interface


def by_interface(interfaces: Mapping[str, str]) -> dict[str, list[str]]:
    """Return interface → the addresses at which another host may reach it, IPv4 first, as gloo prefers them."""
    addresses: dict[str, list[str]] = defaultdict(list)
    for address, name in sorted(interfaces.items(), key=lambda item: ":" in item[0]):
        if not _is_loopback(address) and not address.startswith(("169.254.", "fe80:")):  # link-local
            addresses[name].append(address)
    return dict(addresses)


def is_foreign_address(fact: HostFacts) -> bool:
    """Return whether the configured IP address is on no interface of the host; behind a NAT it may still be valid."""
    if not fact.interfaces or fact.address in fact.interfaces or fact.address == fact.ssh_address:
        return False
    # names are left to the hosts, which resolve them
    return fact.address.replace(".", "").isdecimal() or ":" in fact.address


def interface_problems(host: Host, fact: HostFacts, *, is_alone: bool) -> list[str]:
    """Report a configured interface that doesn't exist, or where other hosts can't reach this one (a loopback)."""
    if host.interface is None or not fact.interfaces:
        return []
    addresses = [address for address, name in fact.interfaces.items() if name == host.interface]
    if addresses and (is_alone or not all(map(_is_loopback, addresses))):
        return []
    problem = f"it has no interface {host.interface!r} with an address"
    if addresses:
        problem = f"its interface {host.interface!r} has only {' and '.join(addresses)}, where no other host reaches it"
    has = "; ".join(f"{name} ({', '.join(addresses)})" for name, addresses in by_interface(fact.interfaces).items())
    hint = "set cluster.interface, or interface: of its entry in cluster.hosts"
    return [f"{problem}; it has {has or 'none but the loopback'}: {hint}"]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def common_interfaces(facts: Sequence[HostFacts]) -> dict[str, list[str]]:
    """Return interface → its address on each host, for unused interfaces that all hosts have."""
    of_hosts = [by_interface(fact.interfaces) for fact in facts]
    names = sorted(set(of_hosts[0]).intersection(*of_hosts[1:]) - {fact.interface for fact in facts})
    common = {name: [by_name[name][0] for by_name in of_hosts] for name in names}
    # hosts with the same address there don't reach each other: a container's bridge has it on every host
    return {name: addresses for name, addresses in common.items() if len(set(addresses)) == len(facts)}


def active_infiniband(fact: HostFacts) -> list[InfinibandPort]:
    """Return the host's InfiniBand ports that are up."""
    return [port for port in fact.infiniband if port.state == "ACTIVE" and port.link_layer == "InfiniBand"]


def nccl_devices(facts: Sequence[HostFacts]) -> list[str | None]:
    """Return NCCL_IB_HCA of each host, its active InfiniBand ports by full name; None unless all hosts have one."""
    ports = [active_infiniband(fact) for fact in facts]
    names = ["=" + ",".join(f"{port.device}:{port.port}" for port in of_host) for of_host in ports]
    return [name if all(ports) else None for name in names]


def over_infiniband(hosts: Sequence[Host], facts: Sequence[HostFacts]) -> list[HostFacts] | None:
    """Return the facts with InfiniBand addresses; None if a host has none, or the configuration names a network."""
    if len(hosts) < 2 or any(host.address or host.interface for host in hosts):
        return None
    moved = []
    for fact in facts:
        addresses = by_interface(fact.interfaces)
        names = [port.netdev for port in active_infiniband(fact) if port.netdev in addresses]
        if not names:
            return None
        moved.append(fact._replace(interface=names[0], address=addresses[names[0]][0]))
    return moved if [fact.address for fact in moved] != [fact.address for fact in facts] else None


def loopback(fact: HostFacts) -> dict[str, str]:
    """Return the variables that keep the ranks of a single host on its loopback, if its name is known (Linux)."""
    name = next((name for address, name in fact.interfaces.items() if _is_loopback(address)), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def variables(host: Host, fact: HostFacts, nccl_devices: str | None, state_dir: str) -> dict[str, str]:
    """Return the variables for gloo's and NCCL's interface and for NCCL's InfiniBand ports."""
    already = fact.network_variables  # only a configured interface overrides those of the host
    env = {}
    if fact.interface is not None:
        chosen = {"GLOO_SOCKET_IFNAME": fact.interface, "NCCL_SOCKET_IFNAME": f"={fact.interface}"}  # '=': whole name
        env = {name: value for name, value in chosen.items() if host.interface or name not in already}
    if nccl_devices is not None and "NCCL_IB_HCA" not in already:
        env["NCCL_IB_HCA"] = nccl_devices
        # NCCL falls back to TCP silently, so let it log which network it uses (trainers/distributed/nccl.py reads that)
        if not any(name.startswith("NCCL_DEBUG") for name in (*already, *host.env)):
            env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG_FILE": f"{state_dir}/nccl.%p"}
    return env


_MAX_ROWS = 10  # lines
_NAMES_SHOWN = 3  # hosts in a line


class Unreached(NamedTuple):
    """A failed connection from ``source`` to ``target`` (indices of hosts) at ``port``."""

    source: int
    target: int
    port: int
    why: str


def listeners(facts: Sequence[HostFacts]) -> list[ListeningNode]:
    """Return where each host is to listen: node 0 at each possible rendezvous port, every other host at one."""
    return [
        ListeningNode(fact.identity, fact.address, fact.free_ports if number == 0 else fact.free_ports[:1])
        for number, fact in enumerate(facts)
    ]


def unreached(answers: Sequence[Mapping[str, Any]]) -> list[Unreached]:
    """Return the failed connections in the answers of all hosts (dicts of ``agent.host.reach.ReachCheck.run``)."""
    # a port that another program took after the probe is no problem of the network; the start takes another one
    taken = [{int(port) for port in answer.get("taken", {})} for answer in answers]
    return [
        Unreached(source, item["node"], item["port"], item["why"])
        for source, answer in enumerate(answers)
        for item in answer.get("failed", [])
        if item["port"] not in taken[item["node"]]
    ]


def unreached_error(failures: Sequence[Unreached], facts: Sequence[HostFacts]) -> HostError:
    """Return the error: which hosts can't reach which, at which address, how that failed, and the fix."""
    # one row for all ports of a target that fail alike, and for all sources with that row
    ports_of: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for item in failures:
        ports_of[item.source, item.target, item.why].append(item.port)
    sources: dict[tuple[int, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (source, target, why), ports in ports_of.items():
        sources[target, why, tuple(ports)].append(source)
    rows = [_failure_row(*target_why_ports, of_row, facts) for target_why_ports, of_row in sources.items()]
    more = [f"  and {len(rows) - _MAX_ROWS} more like these"] if len(rows) > _MAX_ROWS else []
    head = "the hosts can't all connect to each other over TCP, so their ranks would wait for each other in vain:"
    unresolved = [item for item in failures if item.why.startswith(UNRESOLVED)]
    foreign = next((fact for item in failures if is_foreign_address(fact := facts[item.target])), None)
    if unresolved:
        named = facts[unresolved[0].target]
        instead = f" for {named.ssh_address}, where ssh reached it" if named.ssh_address else ""
        hint = (
            f"address: of {named.host}'s entry in cluster.hosts is an IP address or a name that every host can look "
            f"up; leave it out{instead}, or put the name into /etc/hosts of every host"
        )
    elif foreign is not None:
        held = by_interface(foreign.interfaces).items()
        has = ", ".join(f"{', '.join(addresses)} ({name})" for name, addresses in held)
        hint = (
            f"cluster.hosts says that {foreign.host} has the address {foreign.address}; it has {has}: write one of "
            "them as address: of its entry, or leave address: out"
        )
    else:
        hint = _fix_network(failures[0], facts)
    return HostError("\n".join([head, *rows[:_MAX_ROWS], *more]), hint=hint)


def _failure_row(
    target: int, why: str, ports: Sequence[int], sources: Sequence[int], facts: Sequence[HostFacts]
) -> str:
    """Return ``gpu1 and gpu2 can't reach gpu0 (10.0.0.1:29500 over eth0): timed out after 4 s``."""
    names, target_fact = [facts[source].host for source in sources], facts[target]
    who = " and ".join(names) if len(names) <= _NAMES_SHOWN else f"{', '.join(names[:2])} and {len(names) - 2} more"
    if why.startswith(UNRESOLVED):
        whose = "its own" if list(sources) == [target] else f"{target_fact.host}'s"
        return f"  {who} can't resolve {whose} address {target_fact.address!r}: {why.removeprefix(UNRESOLVED)}"
    address = target_fact.address
    if ":" in address and len(ports) == 1:
        address = f"[{address}]"  # IPv6
    where = f"{address}, ports {', '.join(map(str, ports))}" if len(ports) > 1 else f"{address}:{ports[0]}"
    over = {interface for source in sources if (interface := facts[source].interface)}
    where += f" over {' or '.join(sorted(over))}" if over else ""
    why = re.sub(r"^node (\d+)(?= )", lambda number: facts[int(number[1])].host, why)  # "node 1 answers there"
    return f"  {who} can't reach {target_fact.host} ({where}): {why}"


def _fix_network(failure: Unreached, facts: Sequence[HostFacts]) -> str:
    """Return the fix: another network that every host has, else another address; and the firewall's rule."""
    source, target = facts[failure.source], facts[failure.target]
    if failure.why == LARGE_LOST:
        device = source.interface or target.interface or "INTERFACE"
        return (
            f"tracepath -n {target.address} on {source.host} shows where; sudo ip link set dev {device} mtu 1400 on "
            "both, or what that shows; or let ICMP's 'fragmentation needed' through the firewalls between them"
        )
    tool = "ip6tables" if ":" in source.address else "iptables"
    rule = f"sudo {tool} -I INPUT -p tcp -s {source.address} -j ACCEPT"
    firewall = f"let TCP between the hosts through, at every port (on {target.host}: {rule}, and so on)"
    further = common_interfaces(facts)
    if further:
        names = [f"cluster.interface={shlex.quote(name)} ({', '.join(hosts)})" for name, hosts in further.items()]
        return f"{' or '.join(names)}; or {firewall}"
    for fact in (target, source):  # the configuration names another address than ssh's
        if fact.ssh_address not in (None, fact.address):
            without = f"without address: and interface: of {fact.host} it is {fact.ssh_address}"
            return f"{without}, where ssh reached it; or {firewall}"
    entries = ", ".join(f"{{name: {fact.host}, address: ADDRESS}}" for fact in facts[:2])
    rest = ", …" if len(facts) > 2 else ""
    return f"{firewall}; or name addresses of another network: cluster.hosts='[{entries}{rest}]'"
