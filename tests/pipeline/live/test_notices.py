"""Notices of an end: a real command, a real HTTP server, and what becomes of one that can't be told."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.events import Verdict
from pipeline.config.schema import NotifyConfig
from pipeline.core.errors import UsageError
from pipeline.live import notices
from pipeline.live.notices import Notice, Notifier
from tests.pipeline.live.test_run_state import plan
from tests.waiting import wait_until

NOTICE = Notice(
    kind="run", state="FAILED", key="cf08486f7c19", name="digits small_cnn sgd", error="node1, rank 1: it's \"full\"",
    metrics={"val/accuracy": 0.5, "loss": float("nan")}, hosts=("node0", "[red]x"), minutes=2.04,
)  # fmt: skip


def notifier(config: NotifyConfig, say: Callable[[str], None] = lambda _: None, kind: str = "run") -> Notifier:
    return Notifier(config, say, kind=kind, key="k", name="n")


def told(config: NotifyConfig, *sent: Notice) -> list[str]:
    said: list[str] = []
    notes = notifier(config, said.append)
    for notice in sent or (NOTICE,):
        notes.send(notice)
    notes.wait()
    return said


def test_a_command_gets_the_facts_as_variables_and_as_json(tmp_path: Path) -> None:
    script = tmp_path / "told me.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "found = {n: v for n, v in os.environ.items() if n.startswith('PACELINE_')}\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([found, json.load(sys.stdin)]))\n"
    )
    assert told(NotifyConfig(command=f"{sys.executable} '{script}' '{tmp_path}/out file'")) == []
    variables, value = json.loads((tmp_path / "out file").read_text())
    assert variables["PACELINE_STATE"] == value["state"] == "FAILED"
    assert variables["PACELINE_ERROR"] == value["error"] == NOTICE.error
    assert variables["PACELINE_HOSTS"] == "node0 [red]x"
    assert variables["PACELINE_MINUTES"] == "2.0"
    assert value["metrics"] == {"val/accuracy": 0.5, "loss": None}
    assert value["text"] == variables["PACELINE_TEXT"]
    assert value["text"].startswith('FAILED run cf08486f7c19 (digits small_cnn sgd): node1, rank 1: it\'s "full"')


def test_what_fails_is_told_once() -> None:
    (line,) = told(NotifyConfig(command=f"{sys.executable} -c 'exit(7)'"), NOTICE, NOTICE)
    assert line.endswith("ended with exit code 7")


def test_the_line_of_a_script_has_its_figures() -> None:
    notice = Notice(
        kind="run", state="FINISHED", key="k", name="script a.py", metrics={"loss": 0.04, "x": 1e-5, "y": 1}
    )
    assert notice.text == "FINISHED run k (script a.py), loss 0.04, x 1e-05, 0.0 min"


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LIMIT_S", 1.0)
    began = time.monotonic()
    said = told(NotifyConfig(command=f"sh -c 'sleep 100 & echo $! > {tmp_path}/slow; wait'"))
    assert time.monotonic() - began < 30
    assert said == ["WARNING: notify.command got no notice: sh was still running after 1 s"]
    wait_until(lambda: not is_alive(tmp_path / "slow"))
    assert told(NotifyConfig(command=f"sh -c 'sleep 100 & echo $! > {tmp_path}/lasts'")) == []
    assert is_alive(tmp_path / "lasts"), "its command had ended in time"
    os.kill(int((tmp_path / "lasts").read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_of_what_a_command_says_the_end_of_its_errors_is_kept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LIMIT_S", 20.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = "head -c 200000000 /dev/zero"
    said = told(NotifyConfig(command=f"sh -c '{many}; {many} >&2; (echo; echo the last line) >&2; exit 3'"))
    assert len(said) == 1
    assert said[0].endswith("the last line"), said[0][-100:]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    monkeypatch.setattr(notices, "LIMIT_S", 1.0)
    apart = f"sh -c 'setsid sleep 30 & echo $! > {tmp_path}/apart; sleep 30'"  # which keeps its stderr open
    assert told(NotifyConfig(command=apart)) == [
        "WARNING: notify.command got no notice: sh was still running after 1 s"
    ]
    os.kill(int((tmp_path / "apart").read_text()), signal.SIGKILL)


def is_alive(pid_file: Path) -> bool:
    """Whether the process is there, and no zombie that nobody reaps."""
    pid = int(pid_file.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_command_is_told_of_a_run_whose_metrics_no_variable_holds(tmp_path: Path) -> None:
    many = Notice(kind="run", state="FINISHED", key="k", name="n", metrics={f"{n:030}": 0.5 for n in range(4000)})
    assert (
        told(NotifyConfig(command=f"sh -c 'cat > {tmp_path}/in; echo $PACELINE_STATE:$PACELINE_METRICS >&2'"), many)
        == []
    )
    assert len(json.loads((tmp_path / "in").read_text())["metrics"]) == 4000


def test_ctrl_c_ends_the_notice_that_is_waited_for_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    notes = notifier(NotifyConfig(command=f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 30'"), said.append)
    notes.send(NOTICE)
    wait_until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().endswith("\n"))
    began = time.monotonic()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    notes.wait()  # what it tells of is over: the command ends as it would have
    assert time.monotonic() - began < 5
    assert said == ["WARNING: notify.command got no notice: stopped by SIGINT before it was through"]
    wait_until(lambda: not is_alive(tmp_path / "pid"))


def test_a_program_that_is_not_there_is_told_before_the_training_and_once() -> None:
    said: list[str] = []
    notes = notifier(NotifyConfig(command="no-such-program-here --x"), said.append)
    assert said == ["WARNING: notify.command got no notice: no-such-program-here is not there, or not executable"]
    notes.send(NOTICE)
    notes.wait()
    assert len(said) == 1


@pytest.mark.parametrize("command", ["", "  ", "say 'x"])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match=r"notify\.command"):
        NotifyConfig(command=command)


def test_that_ranks_stop_moving_is_told_at_once_and_of_a_sweep_with_the_trials_number(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    config = NotifyConfig(command=f"sh -c 'echo $PACELINE_STATE $PACELINE_HOSTS $PACELINE_ERROR >> {heard}'")
    verdict = Verdict(rank=1, host="node1", kind="stopped", text="rank 1 hangs")
    for kind, event in (("run", verdict), ("sweep", (3, verdict))):
        notes = notifier(config, print, kind)
        notes.on_event(plan("node0", "node1") if kind == "run" else (3, plan("node0", "node1")))
        notes.on_event(event)
        notes.wait()
    assert heard.read_text() == "STALLED node0 node1 rank 1 hangs\nSTALLED trial 3: rank 1 hangs\n"
