"""The agents' check of the network: every node listens and connects to all others, here on loopback in one process."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from pipeline.cluster.agent.host import probe, reach
from pipeline.cluster.agent.requests import ListeningNode

HELLO, ANSWER = "hello-1", "answer-1"


def nodes(count: int) -> list[ListeningNode]:
    return [ListeningNode("", f"127.0.0.{number + 1}", probe.free_ports(1)) for number in range(count)]


def checked(among: list[ListeningNode], *numbers: int, late: int | None = None) -> list[dict[str, Any]]:
    """What each of ``numbers`` answers; ``late`` begins when the others have been refused for a while."""

    def one(number: int) -> dict[str, Any]:
        if number == late:
            time.sleep(4 * reach.RETRY_S)
        return reach.ReachCheck(among, number, HELLO, ANSWER, reach.LIMIT_S).run()

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience, for what fails in the end."""
    for name, seconds in (("CONNECT_S", 0.3), ("LIMIT_S", 0.4), ("RETRY_S", 0.02)):
        monkeypatch.setattr(reach, name, seconds)


@contextmanager
def replying(address: str, port: int, said: bytes) -> Iterator[None]:
    """A program that says something to whoever has said a line."""

    class Reply(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(said)

    with socketserver.ThreadingTCPServer((address, port), Reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_thirty_two_nodes_reach_each_other_at_every_port_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT_S", 60.0)  # all of them share one processor here
    all_nodes = nodes(32)
    all_nodes[0] = all_nodes[0]._replace(ports=probe.free_ports(4))
    assert checked(all_nodes, *range(32)) == [{"taken": {}, "failed": []}] * 32


def test_all_ports_of_another_node_are_tried_at_once_so_that_refusals_add_up_to_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, together = nodes(2), threading.Barrier(4)
    two[0] = two[0]._replace(ports=probe.free_ports(4))

    def dial(self: reach.ReachCheck, node: int, port: int) -> str:
        together.wait(20.0)
        return "refused"

    monkeypatch.setattr(reach, "CONNECT_S", 0.1)  # node 0, which isn't there, is waited for
    monkeypatch.setattr(reach.ReachCheck, "dial", dial)
    (answer,) = checked(two, 1)
    assert {item["port"] for item in answer["failed"]} == set(two[0].ports)


def test_a_node_has_no_more_connections_open_than_a_process_may_have_files(monkeypatch: pytest.MonkeyPatch) -> None:
    open_of = dict.fromkeys(range(6), 0)
    most, dial = list[int](), reach.ReachCheck.dial

    def counted(self: reach.ReachCheck, node: int, port: int) -> str:
        open_of[self.me] += 1
        most.append(open_of[self.me])
        try:
            return dial(self, node, port)
        finally:
            open_of[self.me] -= 1

    monkeypatch.setattr(reach, "AT_ONCE", 2)
    monkeypatch.setattr(reach.ReachCheck, "dial", counted)
    assert checked(nodes(6), *range(6)) == [{"taken": {}, "failed": []}] * 6
    assert max(most) <= 2


@pytest.mark.slow
def test_an_address_without_a_way_does_not_hide_that_another_one_of_the_name_listens_in_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = nodes(2)
    two[1] = two[1]._replace(address="both")
    known = {"both": [(socket.AF_INET, ("127.0.0.2", 0)), (socket.AF_INET, ("255.255.255.255", 0))]}
    alone = [(socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(reach, "resolve", lambda address: known.get(address, alone))
    monkeypatch.setattr(reach, "open_listeners", lambda _, port: [socket.create_server(("127.0.0.2", port))])
    two[0] = two[0]._replace(ports=())
    assert checked(two, 0, 1, late=1) == [{"taken": {}, "failed": []}] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_node_that_answered_and_left_has_not_lost_large_packets() -> None:
    two = nodes(2)
    with replying(two[1].address, two[1].ports[0], f"{ANSWER} 1\n".encode()):
        (answer,) = checked(two, 0)
    assert answer["failed"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_node_that_never_listens_is_refused() -> None:
    two = nodes(2)
    (answer,) = checked(two, 0)
    assert answer["failed"] == [{"node": 1, "port": two[1].ports[0], "why": "refused"}]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_port_that_swallows_what_is_sent_times_out() -> None:
    two = nodes(2)
    with socket.socket() as full:
        full.bind((two[1].address, two[1].ports[0]))
        full.listen(0)
        filling = [socket.socket() for _ in range(4)]  # beyond the backlog Linux drops the SYN, as a firewall does
        for one in filling:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        (answer,) = checked(two, 0)
        for one in filling:
            one.close()
    assert [item["why"] for item in answer["failed"]] == ["timed out after 0.6 s"]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "another program answers there"),
        (f"{HELLO} 0\n".encode(), "another program answers there"),  # an echo knows what was said, not what to answer
        (f"{ANSWER} 2\n".encode(), "node 2 answers there"),
    ],
)
def test_a_foreign_listener_is_not_taken_for_the_node(said: bytes, why: str) -> None:
    two = nodes(2)

    with replying(two[1].address, two[1].ports[0], said):
        (answer,) = checked(two, 0)
    assert [item["why"] for item in answer["failed"]] == [why]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("address", ["1.2.3.4; id", "a..b"])  # neither asks a name server
def test_an_address_that_nobody_can_look_up_is_told_by_all_and_its_node_by_itself(address: str) -> None:
    two = nodes(2)
    two[0] = two[0]._replace(address=address)
    for answer in checked(two, 0, 1):
        assert answer["taken"] == {}, "or the failures would be taken for another program's"
        (failed,) = answer["failed"]
        assert (failed["node"], failed["port"]) == (0, two[0].ports[0])
        assert failed["why"].startswith("can't resolve it: ")


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_port_that_was_taken_meanwhile_is_told_and_not_waited_for() -> None:
    two = nodes(2)
    with socket.socket() as other:
        other.bind((two[0].address, two[0].ports[0]))
        other.listen()
        first, second = checked(two, 0, 1)
    assert tuple(first["taken"]) == two[0].ports
    assert (first["failed"], [item["node"] for item in second["failed"]]) == ([], [0])
