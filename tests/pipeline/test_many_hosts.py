"""What a cluster of many hosts must not do: fill the screen, or send each host what all the others know."""

from __future__ import annotations

import pytest

from pipeline.cluster.agent.node import PEERS, peers_of
from pipeline.cluster.agent.requests import ProbeRequest
from pipeline.cluster.launchers.local import LocalTransport
from pipeline.cluster.launchers.transport.agent_client import AgentClient
from pipeline.cluster.launchers.transport.answers import Answer, Output
from pipeline.cluster.launchers.transport.payload import message, opening
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from tests.agent_records import node_start, start_request

NODES = [node_start(identity=f"host{number} 10.0.{number // 256}.{number % 256}:22 uid 0") for number in range(1000)]


def test_an_error_of_many_hosts_shows_the_first_ones_and_how_many_more_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = tuple(Host(name=f"host{number}") for number in range(300))
    client = AgentClient(LocalTransport(Cluster(launcher="local", hosts=hosts)))
    missing = Output(code=None, note="program not found: python4")
    answers = {host.label: Answer(value=None, output=missing) for host in hosts}
    monkeypatch.setattr(client, "ask", lambda *_, **options: answers)
    with pytest.raises(HostError) as caught:
        client.demand("probe", ProbeRequest(workdir="~"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "probe: 300 of 300 hosts can't take part"
    assert lines[1].startswith("  host0: program not found")
    assert lines[21:] == ["  and 280 more", "  try: cluster.python=null, or the path of an interpreter"]
    assert len(caught.value.hosts) == 300
    _, hints = client.failures(answers, lambda host, _: ("down", f"ssh {host.label} true"))
    assert hints == ["ssh host0 true, and the same for host1, host2, host3, host4 and 295 more"]


def test_a_node_tries_the_next_few_nodes_where_it_hears_nobody() -> None:
    found = peers_of(NODES[995], NODES)
    assert len(found) == PEERS
    assert [port for _, port in found] == [22] * PEERS
    assert found == [("10.0.3.228", 22), ("10.0.3.229", 22), ("10.0.3.230", 22)]
    local = node_start(identity="here 127.0.0.1:0 uid 0")
    assert peers_of(local, [local]) == []


def test_a_request_with_the_parts_of_a_thousand_nodes_is_small() -> None:
    argv, env = ("python3", "-m", "torch.distributed.run", "--nnodes=1000"), {"A": "x" * 1000}
    request = start_request(*(node._replace(argv=argv, env=env) for node in NODES))
    assert len(message(request, "f00d")) - len(opening()) < 20_000
    assert len(opening()) < 100_000, "this computer sends it to each host"
