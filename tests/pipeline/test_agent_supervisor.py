"""The supervisor on a node: whatever becomes of it, of its clock or of its folder, it leaves no process behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.node import identity
from pipeline.cluster.agent.requests import NodeStart, StartRequest, StopRequest
from pipeline.cluster.agent.running import processes, registry, supervisor
from pipeline.cluster.agent.running.rank_ends import EarlyExits
from pipeline.cluster.agent.running.supervisor import Rendezvous, Supervisor
from pipeline.cluster.agent.wire import LONGEST_LOOK_S, Silence
from pipeline.runs import journal, ranks
from pipeline.runs.folder import RunFolder
from tests.agent_records import HERE, node_start, start_request
from tests.waiting import HANG_S, promised_s
from trainers.contract import variables

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_silent_controller_makes_a_node_ask_one_other_node_and_all_only_when_that_is_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        node_start(identity=f"host{number} 10.0.0.{number}:22 uid 0", state_dir=str(tmp_path), node_rank=number)
        for number in range(9)
    ]
    asked, slept, alive = list[str](), list[float](), ["10.0.0.2"]
    monkeypatch.setattr(Silence, "look", lambda _: 60.0)
    monkeypatch.setattr(supervisor, "accepts_connection", lambda address, _: asked.append(address) or address in alive)
    one = Supervisor(start_request(*nodes), nodes[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            assert asked == [], "while other nodes are being started"
            (tmp_path / "attached").touch()  # the controller follows
        if len(slept) == 5:
            alive.clear()
        if one.reason:
            raise TimeoutError

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(TimeoutError):
        one.watch_peers()
    numbers = [int(address.rpartition(".")[2]) for address in asked]
    assert numbers == [1, 2, 2, 2, *(2, 1, 3), *(2, 1, 3)]
    assert slept == [processes.POLL_S, processes.POLL_S, 1.0, 1.0, 1.0, 0.2, 0.2]
    assert one.reason.startswith("isolated")


@pytest.mark.parametrize(
    ("silent_s", "left_s", "ends"), [(60.0, 6.0, True), (1.0, 60.0, False), (60.0, 4.0, False), (60.0, 0.0, False)]
)
def test_a_node_whose_first_node_has_ended_does_not_wait_for_the_lease_of_a_controller_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, left_s: float, ends: bool
) -> None:
    """As a frozen host that goes on after another has taken its place: its ranks would hold it for cluster.lease_s."""
    node = node_start(identity="host1", state_dir=str(tmp_path), node_rank=1)
    for name in ("attached", "agent.json", "beat"):
        (tmp_path / name).touch()
    one = Supervisor(start_request(node), node)
    monkeypatch.setattr(one.lease, "look", lambda: silent_s)
    monkeypatch.setattr(one.rendezvous, "left_s", lambda: left_s)
    one.check()
    assert (one.end_at is not None) == ends
    assert ("torchrun of the first node has ended" in one.reason) == ends


def test_a_refused_start_does_not_start_and_its_tombstone_goes_after_a_day(
    node: tuple[StartRequest, NodeStart],
) -> None:
    request, one = node
    bars = registry.Registry(request.registry, request.access)
    bars.refuse_start(request.run_id)
    bars.forget_dead()
    assert "it was stopped meanwhile" in Supervisor(request, one).begin()
    tombstone = bars.tombstone_path(request.run_id)
    os.utime(tombstone, (time.time() - 90_000,) * 2)
    bars.forget_dead()
    assert not Path(tombstone).exists()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[StartRequest, NodeStart]]:
    """A start and its node, whose torchrun only sleeps."""
    run_dir = tmp_path / "runs" / "key"
    run_id = journal.new_attempt_id(uuid.uuid4().hex[:12], run_dir, 1, "abc123")
    node = node_start(
        identity=identity(HERE), argv=tuple(SLEEP), run_dir=str(run_dir), state_dir=str(run_dir / "state")
    )
    request = start_request(
        node,
        run_key="key",
        run_id=run_id,
        attempt_prefix=journal.prefix_of_attempt(run_id),
        registry=str(tmp_path / "runs" / ".agents"),
        env_passed=("*",),
    )
    (run_dir / "state").mkdir(parents=True)
    (run_dir / "state" / "lease").touch()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield request, node
    for number, handler in handlers.items():
        signal.signal(number, handler)
    processes.end_tree(request.attempt_prefix, 0.0)


def supervise(request: StartRequest, node: NodeStart, meanwhile: Callable[[], None] = lambda: None) -> None:
    """A supervisor's life in this process; ``meanwhile`` is done once torchrun is up."""
    one, watcher = Supervisor(request, node), threading.Thread(target=meanwhile)
    assert one.begin() == ""
    watcher.start()
    one.run()
    watcher.join()


@pytest.mark.parametrize("error", [MemoryError("no more"), RuntimeError("a mistake"), OSError(28, "No space left")])
def test_a_supervisor_that_fails_takes_its_tree_along_and_says_why(
    node: tuple[StartRequest, NodeStart], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    request, one = node

    def fails(*_: Any) -> int:
        raise error

    monkeypatch.setattr(Supervisor, "wait", fails)
    supervise(request, one)
    assert processes.find_processes(request.attempt_prefix) == set()
    ended = json.loads((Path(one.state_dir) / "exit.json").read_text())
    assert ended["reason"].startswith("the node agent could not go on: ")
    assert str(error.args[-1]) in ended["reason"]
    assert list(Path(request.registry).iterdir()) == []


def test_a_disk_that_is_full_at_the_start_is_told_with_the_place_and_nothing_runs(
    node: tuple[StartRequest, NodeStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor, "write_json", full)
    request, one = node
    error = Supervisor(request, one).begin()
    assert re.search(rf"full disk \(.*: '{one.state_dir}/agent.json', \d+ bytes are free there\); make room", error)
    assert "cluster.workdir (on this computer paths.runs)" in error
    assert processes.find_processes(request.attempt_prefix) == set()


def remove(folder: str) -> None:
    """Also where somebody writes a file there meanwhile."""
    while Path(folder).is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_removed_folder_ends_the_tree(node: tuple[StartRequest, NodeStart]) -> None:
    request, one = node
    began = time.monotonic()
    supervise(request, one, lambda: remove(one.run_dir))
    assert time.monotonic() - began < promised_s(10)
    assert processes.find_processes(request.attempt_prefix) == set()
    assert not Path(one.run_dir).exists(), "nothing may be made anew where somebody removed it"
    assert list(Path(request.registry).iterdir()) == []


@pytest.mark.slow
def test_a_controller_that_beats_no_more_ends_the_run_whatever_the_time_stamp_says(
    node: tuple[StartRequest, NodeStart],
) -> None:
    request, one = node
    state = Path(one.state_dir)
    (state / "attached").touch()
    os.utime(state / "lease", (4e9, 4e9))
    supervise(request._replace(lease_s=1.5), one)
    assert json.loads((state / "exit.json").read_text())["reason"] == ("the controller has not been heard of for 1.5 s")


@pytest.mark.slow
def test_stop_ends_what_no_registration_names_and_only_what_is_of_this_folder(
    tmp_path: Path, node: tuple[StartRequest, NodeStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = node
    other = journal.new_attempt_id("key", tmp_path / "another clone" / "key", 1, "abc123")

    def rank(run_id: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(SLEEP, env={**os.environ, variables.NODE: f"{run_id}:0"}, start_new_session=True)

    orphan, earlier, others = (rank(request.run_id), rank(f"{request.attempt_prefix}7-fedcba"), rank(other))
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(registry, "say", lambda **fields: said.append(fields))
    try:
        for child in (orphan, earlier):
            while child.pid not in processes.find_processes(request.attempt_prefix):
                time.sleep(0.01)
        stop = StopRequest(request.attempt_prefix, request.registry, access=HERE)
        registry.stop(stop)
        assert said == [{"survivors": []}]
        assert orphan.wait(HANG_S) < 0
        assert earlier.wait(HANG_S) < 0
        assert others.poll() is None, "that of another clone"
        monkeypatch.setattr(processes, "send_all", lambda *_: None)  # one that nothing can end
        monkeypatch.setattr(registry, "TERM_GRACE_S", 0.1)
        registry.stop(stop._replace(attempt_prefix=journal.prefix_of_attempt(other)))
        assert said[1] == {"survivors": [f"process {others.pid}"]}
    finally:
        for child in (orphan, earlier, others):
            child.kill()
            child.wait()


TORCHRUN = """
import os, pathlib, subprocess, sys, time
def rank(number, program):
    folder = pathlib.Path(sys.argv[1], f"ranks/x/attempt_0/{number}")
    folder.mkdir(parents=True)
    note = f"import os, pathlib; pathlib.Path({str(folder)!r}, f'running-{{os.getpid()}}').touch();"
    return subprocess.Popen([sys.executable, "-c", note + program])
early = rank(0, "")
peer = rank(1, "import time; time.sleep(60)")
early.wait()
"""
WAITS = "peer.wait()"
ENDS_THE_PEER = "print('Sending process', peer.pid, 'closing signal SIGTERM'); peer.kill(); peer.wait();"
TELLS_ALL = "print('  exitcode  : -6 (pid: %d)' % early.pid);"
"""Of ranks that end at once torchrun names the first alone before its last words."""
EARLY = [(4, "ended with exit code 0 before the run was ov")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "named"),
    [
        (WAITS, EARLY),
        (f"{ENDS_THE_PEER} {TELLS_ALL} sys.exit(1)", [(4, "ended with signal 6 (SIGABRT)")]),
        ("peer.kill(); peer.wait(); os.kill(os.getpid(), 9)", []),
    ],
)
def test_a_rank_that_ends_early_with_exit_code_0_is_named(
    node: tuple[StartRequest, NodeStart], then: str, named: list[tuple[int, str]]
) -> None:
    """torchrun waits for the other rank, or ends it and tells all exit codes, or is killed: then nobody knows."""
    request, one = node
    state = Path(one.state_dir)
    argv = (sys.executable, "-c", TORCHRUN + then, str(state))
    supervise(request, one._replace(argv=argv, first_rank=4, nproc_per_node=2))
    ended = json.loads((state / "exit.json").read_text())
    assert ended["code"] != 0
    assert [(error["rank"], error["message"][:44]) for error in ended["errors"]] == named


def test_silence_counts_changes_and_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "lease"
    path.touch()
    silence = Silence(str(path))

    def look(after_s: float) -> float:
        now[0] += after_s
        return silence.look()

    assert [look(0.5), look(0.5)] == [0.5, 1.0]
    os.utime(path, (0, 0))  # the clock was set back by decades
    assert look(0.5) == 0.0
    os.utime(path, (4e9, 4e9))  # and far ahead: nothing is heard any more from here on
    assert [look(0.5), look(0.5)] == [0.0, 0.5]
    assert look(3600.0) == 0.5 + LONGEST_LOOK_S, "this process was stopped for an hour, not the controller"
    path.unlink()
    assert look(0.5) == 1.0 + LONGEST_LOOK_S


@pytest.fixture
def ended_rank(tmp_path: Path) -> Path:
    """The file by which a rank whose process is gone says that its run isn't over."""
    (tmp_path / "ranks/x/attempt_0/0").mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    return tmp_path / f"ranks/x/attempt_0/0/running-{gone.pid}"


def test_an_early_end_has_the_exit_code_that_torchrun_reports(tmp_path: Path, ended_rank: Path) -> None:
    ended_rank.touch()
    exits = EarlyExits(str(tmp_path))
    assert (exits.ranks(), exits.torchrun_ends_others) == ({0: 0}, False)
    exits.read("W1122 14:35:38 api.py:1010] Sending process 4194999 closing signal SIGTERM")
    assert exits.torchrun_ends_others
    exits.read(f"  exitcode  : -9 (pid: {ended_rank.name.partition('-')[2]}) (SIGKILL)")
    assert exits.ranks() == {0: -9}


def test_a_rank_that_begins_while_all_are_ended_has_not_ended_by_itself(tmp_path: Path, ended_rank: Path) -> None:
    killed, ended = EarlyExits(str(tmp_path)), EarlyExits(str(tmp_path))
    killed.torchrun_ended(-9)
    ended.about_to_end_all()
    ended_rank.touch()
    killed.about_to_end_all()
    assert (killed.ranks(), ended.ranks()) == ({}, {})


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


def test_a_node_has_joined_when_its_torchrun_listens_or_is_connected(server: socket.socket) -> None:
    first, other = Rendezvous(place(server), first=True), Rendezvous(place(server), first=False)
    assert first.news() == []
    server.listen()
    line = "paceline: torchrun is at {}:{}, where the hosts meet".format(*place(server))
    assert (first.news(), first.news(), other.news()) == ([line], [], [])
    with socket.create_connection(server.getsockname()[:2]):
        assert other.news() == [line]


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


COME = "- | paceline: torchrun is at 10.0.0.1:4711, where the hosts meet\n"


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
    assert (ranks.hosts_awaited(folder), ranks.under_way(folder)) == (told, told)


def test_torchs_own_warning_is_told(tmp_path: Path) -> None:
    warning = "The client socket has failed to connect to [node0]:4711 (errno: 111 - Connection refused)."
    folder = waiting(tmp_path, COME, f"- | [W1122 06:00:00.1 socket.cpp:764] [c10d] {warning}\n")
    assert ranks.hosts_awaited(folder) == f"waiting for node1: node1 says: {warning}; node0 has come"


@pytest.mark.parametrize("logs", [("", ""), (COME, COME), (COME,), ()])
def test_nobody_is_named_before_the_first_has_come_and_when_all_have(tmp_path: Path, logs: tuple[str, ...]) -> None:
    assert ranks.hosts_awaited(waiting(tmp_path, *logs)) is None


def test_the_lines_of_an_earlier_start_of_the_attempt_do_not_count(tmp_path: Path) -> None:
    other = COME.replace("4711", "4710")
    assert ranks.hosts_awaited(waiting(tmp_path, other + COME, other)) is not None
