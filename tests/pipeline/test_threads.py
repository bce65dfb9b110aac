"""No thread of the controller ends without a word, and a live stream survives what breaks it."""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.events import Event, LogLine, NodeExit, NodeLost, NodeSilent
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.transport import streams
from pipeline.cluster.launchers.transport.streams import Connection, Streams
from pipeline.core.processes import threads
from pipeline.core.specs import Cluster, Host
from tests.waiting import HANG_S


def test_whatever_a_thread_raises_is_told_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.processes.unexpected._in_runs", [])
    told: list[str] = []
    for error in (ValueError("of a\nline"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        threads.start(fail, name="fails", on_error=told.append).join()
    assert told[0].startswith("ValueError: of a line (test_threads.py:")
    assert told[1].startswith("SystemExit: 3 (test_threads.py:")
    kept = [Path(text.rpartition("the traceback: ")[2]) for text in told]
    assert all(path.is_file() and path.is_relative_to(tmp_path_factory.getbasetemp()) for path in kept), kept


NODE = """
import json, os, signal, sys, time
opening = json.loads(sys.stdin.readline())
if "{once}" and not os.path.exists({flag!r}):
    open({flag!r}, "w").close()
    first = True
else:
    first = False
lines = ["0 | %d" % number for number in range(50)]
def say(**fields):
    sys.stdout.write("@paceline f00d " + json.dumps(fields) + chr(10)); sys.stdout.flush()
def log(start, end):
    say(lines={{"file": "log", "texts": lines[start:end], "start_bytes": start, "end_bytes": end}})
at = opening["log_at"]
{body}
log(at, 50)
say(end={{"code": 0}}, now=time.time())
"""


def followed(tmp_path: Path, body: str) -> list[Event]:
    """What is heard of a node that does ``body`` on the first of its connections."""
    flag = tmp_path / "was here"
    program = NODE.format(once="1", flag=str(flag), body=f"if first:\n    log(at, 20); at = 20\n    {body}")
    return hear(program, slow_s=HANG_S)


def hear(program: str, *, slow_s: float = 0.0, silent_s: float = 0.0, lease_s: float = 0.0) -> list[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    node = Connection(host="node0", argv=[sys.executable, "-c", program], slow_s=slow_s, silent_s=silent_s)
    following = Streams(
        [node], lambda log, _: json.dumps({"log_at": log}).encode() + b"\n", events.put, 0, "f00d", lease_s
    )
    try:
        heard: list[Event] = []
        while not heard or not isinstance(heard[-1], NodeExit | NodeLost):
            heard.append(events.get(timeout=HANG_S))
        return heard
    finally:
        following.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        'sys.stdout.write(\'@paceline f00d {"lines": {"file": "log", "texts": ["0 | 2\'); sys.exit()',
        "say(lines={'file': 'log', 'texts': [7], 'start_bytes': 20, 'end_bytes': 30}); at = 30",
        "sys.stdout.write('@paceline f00d ] is what the shell of this host says\\n')",
        'sys.stdout.buffer.write(b\'@paceline f00d {"lines": {"file": "log", "texts": ["\\xc3\'); sys.exit()',
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "log(30, 40); time.sleep(60)",
        "say(end={'code': 'x'}, now=1); sys.exit()",
        'sys.stdout.write(\'@paceline {"error": "forged"}\\na title without an end\')',
    ],
    ids=["cut", "types", "chatter", "utf-8", "killed", "stopped", "gap", "exit", "forged"],
)
def test_a_broken_stream_is_taken_up_again_and_every_line_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(streams, "_SILENT_S", 3.0)
    heard = followed(tmp_path, body)
    assert [line.text for line in heard if isinstance(line, LogLine)] == [str(number) for number in range(50)]
    assert heard[-1] == NodeExit(host="node0", code=0)


@pytest.mark.slow
def test_an_agent_of_this_computer_that_gets_no_processor_for_a_while_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_SILENT_S", 0.2)
    monkeypatch.setattr(streams, "LOST_S", 0.4)
    here = Host(name="localhost")
    launcher = launchers.create(Cluster(launcher="local", hosts=(here,)))
    assert isinstance(launcher, AgentLauncher)
    limit_s = launcher.connection(here).silent_s
    assert limit_s >= 60
    program = NODE.format(once="", flag=str(tmp_path / "no"), body="log(0, 20); time.sleep(3); at = 20")
    heard = hear(program, silent_s=limit_s)  # a second connection would begin with line 0 again
    assert [line.text for line in heard if isinstance(line, LogLine)] == [str(number) for number in range(50)]


@pytest.mark.slow
def test_a_host_that_is_busy_with_the_start_has_more_time_for_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_SILENT_S", 0.2)
    monkeypatch.setattr(streams, "LOST_S", 0.2)
    heard = hear(NODE.format(once="", flag=str(tmp_path / "no"), body="time.sleep(2.5)"), slow_s=2.0)
    assert heard[-1] == NodeExit(host="node0", code=0)


@pytest.mark.slow
def test_a_node_that_never_answers_sensibly_is_lost_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOST_S", 4.0)
    (lost,) = hear("print('this host is down today, token=hf_" + "a" * 20 + "', flush=True)")
    assert isinstance(lost, NodeLost)
    assert lost.reason == "no longer answers: it says 'this host is down today, token=***', which is no answer"


@pytest.mark.slow
def test_a_node_that_answers_no_more_is_silent_at_first_and_lost_once_the_lease_of_its_ranks_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streams, "_SILENT_S", 1.0)
    monkeypatch.setattr(streams, "LOST_S", 1.0)
    program = NODE.format(once="1", flag=str(tmp_path / "was here"), body="if first:\n    log(0, 20)\nsys.exit()")
    heard = [event for event in hear(program, lease_s=4.0) if not isinstance(event, LogLine)]
    assert [type(event) for event in heard] == [NodeSilent, NodeLost]


@pytest.mark.slow
def test_a_mistake_in_a_follower_is_a_message_and_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOST_S", 4.0)

    def fails(*_: Any) -> None:
        raise KeyError("rank")

    monkeypatch.setattr(streams, "parse_stream", fails)
    (lost,) = hear("import time; print('@paceline f00d {}', flush=True); time.sleep(60)")
    assert isinstance(lost, NodeLost)
    assert lost.reason.startswith("no longer answers: KeyError: 'rank' (test_threads.py:")


def test_a_mistake_in_the_thread_of_the_beats_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't")

    monkeypatch.setattr(streams._Stream, "send", fails)
    (lost,) = hear("import time; time.sleep(60)")
    assert isinstance(lost, NodeLost)
    assert lost.reason.startswith("can no longer be followed from here: RuntimeError: can't")
