"""Over which network the ranks of a host speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.cluster import networks
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.local import LocalTransport
from pipeline.cluster.validation import validate_hosts
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from tests.pipeline.test_plan import cluster, facts, refused, rendered
from trainers.contract.host_facts import HostFacts, InfinibandPort

HELD = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.9.0.1": "ib0", "fd00::1": "ib0", "fe80::1": "e2", "fd01::1": "e3"}


@pytest.mark.parametrize(
    ("host", "chosen"),
    [
        ({}, ("10.0.0.1", "eth0")),
        ({"interface": "ib0"}, ("10.9.0.1", "ib0")),  # IPv4 first, as gloo
        ({"interface": "e3"}, ("fd01::1", "e3")),
        ({"interface": "eth0"}, ("10.0.0.1", "eth0")),
        ({"address": "10.9.0.1"}, ("10.9.0.1", "ib0")),
        ({"address": "node0-ib"}, ("node0-ib", None)),
        ({"address": "1.2.3.4", "interface": "ib0"}, ("1.2.3.4", "ib0")),
    ],
)
def test_the_address_follows_from_the_chosen_interface(host: dict[str, Any], chosen: tuple[str, str | None]) -> None:
    assert networks.address_and_interface(Host(name="node0", **host), "10.0.0.1", HELD) == chosen


def test_an_interface_that_is_not_there_is_one_error_with_what_the_host_has() -> None:
    hosts = (Host(name="node0", interface="ib0"), Host(name="node1", interface="ib0"))
    found = (facts(0, interfaces=HELD), facts(1, interfaces={"127.0.0.1": "lo", "10.0.0.2": "eth0"}))
    assert refused(Cluster(launcher="pssh", hosts=hosts), *found).splitlines()[1:] == [
        "  node1: it has no interface 'ib0' with an address; it has eth0 (10.0.0.2): set cluster.interface, or "
        "interface: of its entry in cluster.hosts"
    ]


def test_the_loopback_is_no_interface_between_hosts_and_does_for_one() -> None:
    hosts = (Host(name="node0", interface="lo", address="10.0.0.1"), Host(name="node1"))
    held = {"127.0.0.1": "lo", "::1": "lo", "10.0.0.1": "eth0"}
    alone = facts(0, interfaces=held)
    assert refused(Cluster(launcher="pssh", hosts=hosts), alone, facts(1)).splitlines()[1:] == [
        "  node0: its interface 'lo' has only 127.0.0.1 and ::1, where no other host reaches it; it has eth0 "
        "(10.0.0.1): set cluster.interface, or interface: of its entry in cluster.hosts"
    ]
    validate_hosts(Cluster(launcher="pssh", hosts=hosts[:1]), [alone])
    routed = facts(0, interfaces={**held, "fd00::1": "lo"})
    validate_hosts(Cluster(launcher="pssh", hosts=hosts), [routed, facts(1)])


def port(
    device: str, netdev: str | None = None, state: str = "ACTIVE", link_layer: str = "InfiniBand"
) -> InfinibandPort:
    return InfinibandPort(device=device, port=1, state=state, link_layer=link_layer, netdev=netdev)


def with_ports(number: int, *ports: InfinibandPort) -> HostFacts:
    held = {f"10.0.0.{number + 1}": "eth0", f"10.9.0.{number + 1}": "ib0"}
    return facts(number, interface="eth0", infiniband=ports, interfaces=held)


def test_nccl_gets_the_active_infiniband_ports_of_each_host_by_their_whole_names() -> None:
    first = with_ports(0, port("mlx5_0"), port("mlx5_1"), port("mlx5_2", state="DOWN"))
    second = with_ports(1, port("mlx5_4"), port("mlx5_5", link_layer="Ethernet"))
    plan = rendered(cluster(1, 1, device="cuda"), first, second)
    assert [node.env["NCCL_IB_HCA"] for node in plan.nodes] == ["=mlx5_0:1,mlx5_1:1", "=mlx5_4:1"]
    assert "NCCL_IB_HCA" not in rendered(cluster(1, 1), first, second).nodes[0].env, "no GPU, no NCCL"


def test_nccl_logs_the_network_that_it_takes_where_it_was_given_infiniband_unless_somebody_has_set_up_its_log() -> None:
    found = [with_ports(number, port("mlx5_0")) for number in range(2)]
    hosts = (Host(name="node0", env={"NCCL_DEBUG": "WARN"}), Host(name="node1"))
    first, second = (node.env for node in rendered(cluster(1, hosts=hosts, device="cuda"), *found).nodes)
    assert {name: value for name, value in first.items() if name.startswith("NCCL_DEBUG")} == {"NCCL_DEBUG": "WARN"}
    assert (second["NCCL_DEBUG"], second["NCCL_DEBUG_FILE"]) == ("INFO", "/w/runs/abc-2-ff/node1/agent/nccl.%p")


def test_infiniband_that_one_host_lacks_is_left_to_nccl() -> None:
    plan = rendered(cluster(1, 1, device="cuda"), with_ports(0, port("mlx5_0")), with_ports(1))
    assert not any("NCCL_IB_HCA" in node.env for node in plan.nodes)
    assert networks.over_infiniband(cluster(1, 1).hosts, [with_ports(0, port("mlx5_0", "ib0")), with_ports(1)]) is None


def test_what_a_person_or_the_host_has_set_goes_before_what_was_found() -> None:
    hosts = (Host(name="node0", env={"NCCL_IB_HCA": "mlx5_9", "NCCL_SOCKET_IFNAME": "eth"}), Host(name="node1"))
    first, second = with_ports(0, port("mlx5_0")), with_ports(1, port("mlx5_0"))
    own = second._replace(network_variables={"NCCL_IB_HCA": "^mlx5_0"})
    nodes = rendered(Cluster(launcher="pssh", hosts=hosts, device="cuda"), first, own).nodes
    assert (nodes[0].env["NCCL_IB_HCA"], nodes[0].env["NCCL_SOCKET_IFNAME"]) == ("mlx5_9", "eth")
    assert "NCCL_IB_HCA" not in nodes[1].env, "its own reaches the ranks as it is there"


def test_addresses_move_to_infiniband_where_every_host_has_it_and_nothing_was_chosen() -> None:
    hosts = cluster(1, 1).hosts
    found = [with_ports(number, port("mlx5_0", "ib0")) for number in range(2)]
    moved = networks.over_infiniband(hosts, found)
    assert moved is not None
    assert [(fact.address, fact.interface) for fact in moved] == [("10.9.0.1", "ib0"), ("10.9.0.2", "ib0")]
    assert networks.over_infiniband((Host(name="node0", interface="eth0"), hosts[1]), found) is None
    assert networks.over_infiniband(hosts, moved) is None, "ssh is there already"


class Reaching(AgentLauncher):
    """A launcher of two hosts that connect over addresses which begin with ``over``."""

    def __init__(self, over: str) -> None:
        super().__init__(LocalTransport(replace(cluster(1, 1), launcher="local")))
        self.over = over
        self.asked: list[list[str]] = []

    def reach(self, found: list[HostFacts]) -> None:
        self.asked.append([fact.address for fact in found])
        if not all(fact.address.startswith(self.over) for fact in found):
            raise HostError("the hosts can't reach each other:\n  node1 can't reach node0")


@pytest.mark.parametrize(("over", "chosen", "asked"), [("10.", "10.9.0.1", 1), ("10.0.", "10.0.0.1", 2)])
def test_infiniband_is_taken_where_a_trial_over_it_went_well(over: str, chosen: str, asked: int) -> None:
    launcher = Reaching(over)
    moved, note = launcher.connect([with_ports(number, port("mlx5_0", "ib0")) for number in range(2)])
    assert (moved[0].address, len(launcher.asked)) == (chosen, asked)
    assert ("not all connect over it (node1 can't reach node0)" in note) == (asked == 2)
