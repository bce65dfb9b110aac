"""Who has come to where the ranks meet: seen by the agents, told by `doit status` and while a run is waited for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.agent.running import supervisor
from pipeline.cluster.agent.running.supervisor import Rendezvous
from pipeline.runs import status
from pipeline.runs.folder import RunFolder


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that is bound and doesn't listen yet."""
    monkeypatch.setattr(supervisor, "RENDEZVOUS_LOOK_S", 0.0)
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((request.param, 0))
        yield one


def place(server: socket.socket) -> tuple[str, int]:
    address, port = server.getsockname()[:2]
    return address, port


def test_the_first_node_has_come_when_its_torchrun_listens(server: socket.socket) -> None:
    first = Rendezvous(place(server), first=True)
    assert first.news() == []
    server.listen()
    assert first.news() == ["paceline: torchrun is at {}:{}, where the hosts meet".format(*place(server))]
    assert first.news() == [], "told once"


def test_another_node_has_come_when_it_is_connected(server: socket.socket) -> None:
    other = Rendezvous(place(server), first=False)
    server.listen()
    assert other.news() == []
    with socket.create_connection(server.getsockname()[:2]):
        assert "torchrun is at" in other.news()[0]


def test_a_first_node_that_has_left_is_noticed_by_the_connection_that_it_closed(server: socket.socket) -> None:
    other = Rendezvous(place(server), first=False)
    server.listen()
    with socket.create_connection(server.getsockname()[:2]):
        theirs, _ = server.accept()
        assert "torchrun is at" in other.news()[0]
        assert other.left_s() == 0.0
        theirs.close()
        other.left_s()
        time.sleep(0.01)
        assert other.left_s() > 0.0
        with socket.create_connection(server.getsockname()[:2]):
            assert other.left_s() == 0.0, "one of its connections is open"


def test_nothing_is_looked_for_where_nodes_do_not_meet() -> None:
    assert Rendezvous(None, first=True).news() == []


HERE = "10.0.0.1:4711"
COME = f"- | paceline: torchrun is at {HERE}, where the hosts meet\n"


def waiting(folder: Path, *logs: str) -> RunFolder:
    """A run folder whose hosts have logged this so far."""
    nodes = [{"host": f"node{number}", "nproc_per_node": 1} for number in range(len(logs))]
    plan = {"attempt": 2, "master_addr": "10.0.0.1", "master_port": 4711, "nodes": nodes}
    (folder / "attempts" / "2").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    for number, text in enumerate(logs):
        (folder / "attempts" / "2" / f"node{number}.log").write_text(text)
    return RunFolder(folder)


def test_who_has_not_come_yet_is_named_first(tmp_path: Path) -> None:
    folder = waiting(tmp_path, COME, "", COME)
    told = "waiting for node1, where torchrun starts (it imports torch); node0, node2 have come"
    assert (status.hosts_awaited(folder), status.under_way(folder)) == (told, told)


def test_torchs_own_warning_is_told(tmp_path: Path) -> None:
    warning = "The client socket has failed to connect to [node0]:4711 (errno: 111 - Connection refused)."
    folder = waiting(tmp_path, COME, f"- | [W1122 06:00:00.1 socket.cpp:764] [c10d] {warning}\n")
    assert status.hosts_awaited(folder) == f"waiting for node1: node1 says: {warning}; node0 has come"


@pytest.mark.parametrize("logs", [("", ""), (COME, COME), (COME,), ()])
def test_nobody_is_named_before_the_first_has_come_and_when_all_have(tmp_path: Path, logs: tuple[str, ...]) -> None:
    assert status.hosts_awaited(waiting(tmp_path, *logs)) is None


def test_the_lines_of_an_earlier_start_of_the_attempt_do_not_count(tmp_path: Path) -> None:
    other = COME.replace("4711", "4710")
    assert status.hosts_awaited(waiting(tmp_path, other + COME, other)) is not None
