"""The network between real hosts: a firewall that lets only ssh through, and a second network beside ssh's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.events import LogLine
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.contract.conftest import Bench, count_here
from tests.contract.stub import RUN_TO_END
from tests.lab_fixture import firewall, large_packets_lost, second_network

pytestmark = pytest.mark.lab


@pytest.fixture
def cluster(lab: Lab) -> Cluster:
    hosts = tuple(Host(name=host.name, env={"OMP_NUM_THREADS": "1"}) for host in lab.hosts)
    return Cluster(launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), settings=PsshConfig())


@pytest.fixture
def pssh(cluster: Cluster, tmp_path: Path) -> Bench:
    return Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)


def test_preflight_names_the_way_that_a_firewall_closes_and_what_opens_it(cluster: Cluster, lab: Lab) -> None:
    with firewall(lab, "node0", "drop"), pytest.raises(HostError) as caught:
        preflight.examine(cluster).raise_if_failed()
    head, *rows, hint = str(caught.value).splitlines()
    first, second = (host.address for host in lab.hosts)
    assert head.startswith("the hosts can't all connect to each other over TCP")
    assert len(rows) == 1, "the way from node0 to node1 is open"
    assert rows[0].startswith(f"  node1 can't reach node0 ({first}, ports ")
    assert rows[0].endswith(" over eth0): timed out after 4 s")
    assert f"on node0: sudo iptables -I INPUT -p tcp -s {second} -j ACCEPT" in hint


def test_preflight_names_the_way_on_which_large_packets_are_lost(cluster: Cluster, lab: Lab) -> None:
    with large_packets_lost(lab, "node1"), pytest.raises(HostError) as caught:
        preflight.examine(cluster).raise_if_failed()
    _, *rows, hint = str(caught.value).splitlines()
    assert len(rows) == 1, "the way from node1 to node0 carries them"
    assert rows[0].startswith(f"  node0 can't reach node1 ({lab.hosts[1].address}:")
    assert rows[0].endswith(" over eth0): small packets pass, large ones are lost")
    assert f"tracepath -n {lab.hosts[1].address} on node0" in hint
    assert "sudo ip link set dev eth0 mtu 1400" in hint


@pytest.mark.ci
@pytest.mark.long
def test_a_run_is_not_started_where_the_hosts_cannot_reach_each_other(pssh: Bench, lab: Lab) -> None:
    stub = pssh.stub(RUN_TO_END)
    with (
        firewall(lab, "node1", "reject with tcp reset"),
        pytest.raises(HostError, match=r"node0 can't reach node1 \(\S+ over eth0\): refused"),
    ):
        pssh.run(stub)
    assert not (stub.run_dir / "plan.json").exists()


WHERE = """
print("ENV", os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
finish(rank, run)
"""


@pytest.mark.ci
@pytest.mark.long
def test_the_chosen_interface_carries_the_run_where_that_of_ssh_carries_nothing_else(pssh: Bench, lab: Lab) -> None:
    stub, lines = pssh.stub(WHERE, stand_in=True), list[LogLine]()  # with torchrun: the run over IPv6 alone
    with second_network(lab) as addresses, firewall(lab, "node0", "drop"), firewall(lab, "node1", "drop"):
        with pytest.raises(HostError, match=rf"try: cluster\.interface=eth1 \({', '.join(addresses)}\); or let TCP"):
            preflight.examine(pssh.cluster).raise_if_failed()
        hosts = tuple(replace(host, interface="eth1") for host in pssh.cluster.hosts)
        plan = replace(pssh, cluster=replace(pssh.cluster, hosts=hosts)).run(stub, lines)
    assert [node.address for node in plan.nodes] == addresses
    assert {f"--master-addr={addresses[0]}", f"--local-addr={addresses[1]}"} <= set(plan.nodes[1].argv)
    said = {(line.rank, line.text) for line in lines if line.text.startswith("ENV")}
    assert said == {(rank, f"ENV {addresses[0]} eth1 =eth1") for rank in (0, 1)}


GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("SUM", int(total), flush=True)
dist.destroy_process_group()
finish(rank, run)
"""


@pytest.mark.long
def test_ranks_meet_and_sum_over_a_network_that_has_ipv6_alone(pssh: Bench, lab: Lab) -> None:
    stub, lines = pssh.stub(GLOO), list[LogLine]()
    hosts = tuple(replace(host, interface="eth1") for host in pssh.cluster.hosts)
    with second_network(lab, "fd00:99::") as addresses, firewall(lab, "node0", "drop"), firewall(lab, "node1", "drop"):
        plan = replace(pssh, cluster=replace(pssh.cluster, hosts=hosts)).run(stub, lines)
    assert [node.address for node in plan.nodes] == addresses == ["fd00:99::1", "fd00:99::2"]
    assert {(line.rank, line.text) for line in lines if line.text.startswith("SUM")} == {(0, "SUM 2"), (1, "SUM 2")}


def test_an_interface_that_a_host_lacks_is_refused_with_those_it_has(cluster: Cluster, lab: Lab) -> None:
    hosts = tuple(replace(host, interface="ib7") for host in cluster.hosts)
    with pytest.raises(HostError) as caught:
        preflight.examine(replace(cluster, hosts=hosts)).raise_if_failed()
    has = f"it has eth0 ({lab.hosts[0].address}): set cluster.interface"
    assert f"  node0: it has no interface 'ib7' with an address; {has}" in str(caught.value)
