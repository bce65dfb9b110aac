"""What the hosts' answers on the network between them mean to a person."""

from __future__ import annotations

from typing import Any

from pipeline.cluster import networks
from pipeline.cluster.agent.requests import ListeningNode
from tests.pipeline.test_plan import facts
from trainers.contract.host_facts import HostFacts


def host(number: int, **interfaces: str) -> HostFacts:
    held = {"127.0.0.1": "lo", f"10.0.0.{number + 1}": "eth0"}
    held.update({address: name for name, address in interfaces.items()})
    ports = tuple(40000 + 10 * number + offset for offset in range(4))
    return facts(number, interface="eth0", free_ports=ports, interfaces=held)


def failing(*items: tuple[int, int, str]) -> dict[str, Any]:
    return {"taken": {}, "failed": [{"node": node, "port": port, "why": why} for node, port, why in items]}


def told(answers: list[dict[str, Any]], *hosts: HostFacts) -> list[str]:
    """The lines of the error."""
    return str(networks.unreached_error(networks.unreached(answers), hosts)).splitlines()


def test_the_first_host_listens_where_ranks_may_meet_and_the_others_at_one_port() -> None:
    first, second = networks.listeners([host(0), host(1)])
    assert first == ListeningNode(host(0).identity, "10.0.0.1", (40000, 40001, 40002, 40003))
    assert second.ports == (40010,)


def test_the_error_names_both_hosts_the_address_the_interface_and_the_rule_of_the_firewall() -> None:
    lines = told([failing(), failing((0, 40000, "timed out after 2 s"))], host(0), host(1))
    assert lines[1:] == [
        "  node1 can't reach node0 (10.0.0.1:40000 over eth0): timed out after 2 s",
        "  try: let TCP between the hosts through, at every port (on node0: sudo iptables -I INPUT -p tcp -s 10.0.0.2 "
        "-j ACCEPT, and so on); or name addresses of another network: "
        "cluster.hosts='[{name: node0, address: ADDRESS}, {name: node1, address: ADDRESS}]'",
    ]


def test_another_network_that_all_hosts_have_is_named_with_its_addresses() -> None:
    pair = host(0, eth1="10.9.0.1", docker0="172.17.0.1"), host(1, eth1="10.9.0.2", docker0="172.17.0.1")
    hint = told([failing((1, 40010, "refused")), failing()], *pair)[-1]
    assert hint.startswith("  try: cluster.interface=eth1 (10.9.0.1, 10.9.0.2); or let TCP")
    assert "docker0" not in hint, "all hosts have its address"


def test_large_packets_that_are_lost_are_the_matter_of_the_mtu_and_not_of_a_rule_for_ports() -> None:
    hint = told([failing((1, 40010, "small packets pass, large ones are lost")), failing()], host(0), host(1))[-1]
    assert hint.startswith(
        "  try: tracepath -n 10.0.0.2 on node0 shows where; sudo ip link set dev eth0 mtu 1400 on both"
    )
    assert "iptables" not in hint


def test_an_interface_of_one_host_that_leads_nowhere_is_told_with_the_address_of_ssh() -> None:
    chosen = host(1)._replace(ssh_address="10.0.7.2")
    hint = told([failing((1, 40010, "Network is unreachable")), failing()], host(0), chosen)[-1]
    assert hint.startswith(
        "  try: without address: and interface: of node1 it is 10.0.7.2, where ssh reached it; or let"
    )


def test_an_address_that_the_host_has_not_is_told_instead_of_the_firewall() -> None:
    wrong = host(0)._replace(address="10.0.0.2")
    failure = failing(), failing((0, 40000, "refused"))
    assert told([*failure], wrong, host(1))[-1] == (
        "  try: cluster.hosts says that node0 has the address 10.0.0.2; it has 10.0.0.1 (eth0): write one of them as "
        "address: of its entry, or leave address: out"
    )
    assert "iptables" in told([*failure], wrong._replace(ssh_address="10.0.0.2"), host(1))[-1]


def test_hosts_that_fail_alike_stand_in_one_line_with_all_ports() -> None:
    hosts = [host(number) for number in range(5)]
    blocked = failing((0, 40000, "refused"), (0, 40001, "refused"))
    assert told([failing(), *[blocked] * 4], *hosts)[1:-1] == [
        "  node1, node2 and 2 more can't reach node0 (10.0.0.1, ports 40000, 40001 over eth0): refused"
    ]


def test_many_lines_are_cut() -> None:
    hosts = [host(number) for number in range(14)]
    answers = [failing(((number + 1) % 14, 40000, "refused")) for number in range(14)]
    lines = told(answers, *hosts)
    assert (len(lines), lines[-2]) == (13, "  and 4 more like these")


def test_who_answers_in_place_of_the_host_is_named() -> None:
    lines = told([failing((1, 40010, "node 0 answers there")), failing()], host(0), host(1))
    assert lines[1].endswith("can't reach node1 (10.0.0.2:40010 over eth0): node0 answers there")


def test_an_address_that_cannot_be_resolved_is_named_with_who_tried_and_the_one_of_ssh() -> None:
    hosts = facts(0, address="nosuchhost", ssh_address="10.0.0.1"), facts(1)
    why = "can't resolve it: Name or service not known"
    both = failing((0, 40000, why))
    assert told([both, failing((0, 40000, why), (0, 40001, "refused"))], *hosts)[1:] == [
        "  node0 and node1 can't resolve node0's address 'nosuchhost': Name or service not known",
        "  node1 can't reach node0 (nosuchhost:40001 over eth1): refused",
        "  try: address: of node0's entry in cluster.hosts is an IP address or a name that every host can look up; "
        "leave it out for 10.0.0.1, where ssh reached it, or put the name into /etc/hosts of every host",
    ]
    assert told([both, failing()], *hosts)[1].startswith("  node0 can't resolve its own address 'nosuchhost': ")


def test_an_ipv6_address_stands_in_brackets() -> None:
    six = facts(0, address="fd00::1"), facts(1, address="fd00::2")
    lines = told([failing(), failing((0, 40000, "refused"))], *six)
    assert "node0 ([fd00::1]:40000 over eth1): refused" in lines[1]
    assert "sudo ip6tables -I INPUT -p tcp -s fd00::2 " in lines[-1]


def test_a_port_that_another_program_took_meanwhile_is_no_failure_of_the_network() -> None:
    taken = {"taken": {"40000": "address already in use"}, "failed": []}
    assert networks.unreached([taken, failing((0, 40000, "another program answers there"))]) == []
