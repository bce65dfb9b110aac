"""What the agent sees of ranks that hang, each in its own way: real processes that tell where they stand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.agent.requests import ExamineOrder, NodeStart
from pipeline.cluster.agent.running.examination import examine, read_beats
from pipeline.cluster.agent.running.follow import newest_checkpoint
from pipeline.cluster.attempt.stalls import judge
from tests.agent_records import node_start
from tests.waiting import HANG_S
from trainers.contract.beats import STACKS_SIGNAL, NodeExamination, Phase
from trainers.contract.records import as_json, from_json
from trainers.distributed.heartbeat import Heartbeat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from trainers.contract.beats import Phase
from trainers.distributed.heartbeat import HEARTBEAT
HEARTBEAT.publish(Path(sys.argv[1]))
HEARTBEAT.begin_step(12)
def up():  # once it stands where the tests look for it
    print("up", flush=True)
def next_batch():
    up()
    time.sleep(600)
def locked():
    HEARTBEAT.enter(Phase.COMPUTING)
    lock = threading.Lock()
    lock.acquire()
    up()
    lock.acquire()
def spins():
    HEARTBEAT.enter(Phase.COMPUTING)
    up()
    while True:
        pass
def stopped():
    up()
    os.kill(os.getpid(), signal.SIGSTOP)
def worker_stopped():
    worker = subprocess.Popen(["sleep", "600"])
    worker.send_signal(signal.SIGSTOP)
    up()
    worker.wait()
def waits():
    HEARTBEAT.wait()
    up()
    time.sleep(600)
globals()[sys.argv[2]]()
"""
KINDS = {"next_batch": "sleeps", "locked": "lock", "spins": "spins", "stopped": "stopped", "worker_stopped": "stopped"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeStart]:
    """Six ranks of one node; the last one waits for the others."""
    state = tmp_path_factory.mktemp("state [of] a node")
    children = []
    for number, name in enumerate([*KINDS, "waits"]):
        folder = state / "ranks" / "x" / "attempt_0" / str(number)
        folder.mkdir(parents=True)
        argv = [sys.executable, "-c", RANK, str(folder), name]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        children.append(subprocess.Popen(argv, stdout=subprocess.PIPE, env=env, start_new_session=True))
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
        yield node_start(state_dir=str(state), first_rank=8)
    finally:
        for child in children:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=HANG_S)


@pytest.fixture(scope="module")
def seen(node: NodeStart) -> NodeExamination:
    return from_json(NodeExamination, as_json(examine(node, ExamineOrder())))


def test_a_beat_tells_where_each_rank_stands(node: NodeStart) -> None:
    beats = [beat for _, beat in read_beats(node)]
    assert [beat.rank for beat in beats] == [8, 9, 10, 11, 12, 13]
    assert {beat.step for beat in beats} == {12}
    assert [beat.phase for beat in beats] == [
        Phase.LOADING,
        *[Phase.COMPUTING] * 2,
        *[Phase.LOADING] * 2,
        Phase.WAITING,
    ]
    assert [beat.collectives for beat in beats] == [0, 0, 0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(KINDS)))
def test_an_examination_tells_the_kinds_of_hanging_apart(seen: NodeExamination, number: int, name: str) -> None:
    culprit, waiting = seen.ranks[number], seen.ranks[-1]
    verdict = judge([culprit, waiting], {}, 300.0)
    assert (verdict.rank, verdict.kind) == (8 + number, KINDS[name])
    if name != "stopped":  # it can't say itself where it is
        assert any(f" in {name}" in frame for frame in culprit.stack)  # the innermost one may still be the print


@pytest.mark.slow
def test_an_examination_ends_no_rank_that_has_no_handler(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "x" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    beat = Heartbeat()
    beat.publish(folder)
    before = signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
    try:
        (rank,) = examine(node_start(state_dir=str(tmp_path)), ExamineOrder()).ranks
    finally:
        signal.signal(STACKS_SIGNAL, before)
    assert rank.stack == ()


def test_ranks_that_are_gone_and_damaged_files_are_no_ranks(tmp_path: Path) -> None:
    for number, target in enumerate(("/proc/4194304/fd/3", "/dev/null")):
        folder = tmp_path / "ranks" / "x" / "attempt_0" / str(number)
        folder.mkdir(parents=True)
        (folder / "beat").symlink_to(target)
    assert read_beats(node_start(state_dir=str(tmp_path))) == []


@pytest.mark.slow
def test_bytes_that_a_peer_does_not_take_are_seen_on_the_connection(node: NodeStart, tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "x" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    Heartbeat().publish(folder)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as stuck:
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while stuck.send(bytes(1 << 16)):
                pass
        port = server.getsockname()[1]
        here = node_start(state_dir=str(tmp_path))
        (rank,) = examine(here, ExamineOrder()).ranks
        told = examine(here, ExamineOrder(peers=(("127.0.0.1", port), ("127.0.0.1", 1))))
    assert ("127.0.0.1", True) in [(item.peer, item.unsent_bytes > 0) for item in rank.sockets]
    assert told.peers == ((f"127.0.0.1:{port}", "silent"), ("127.0.0.1:1", "refuses"))


def test_the_newest_checkpoint_is_one_whose_side_file_is_there(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) == 0
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-00000040.json", "step-00000080.json", "step-00000120.pt", "step-x.json"):
        (tmp_path / "checkpoints" / name).touch()
    assert newest_checkpoint(str(tmp_path)) == 80
