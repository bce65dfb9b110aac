"""The agent that was begun ahead on this computer may be killed or stopped by anybody: a start then takes longer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.launchers import local_agent
from pipeline.cluster.launchers.agent_launcher import Turn
from pipeline.cluster.launchers.local import LocalLauncher
from pipeline.core.specs import Cluster, Host
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock, locked

ENDS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setattr(local_agent, "prepare", lambda *_, **__: b"")  # torch isn't needed here
    launcher = LocalLauncher(Cluster(launcher="local", hosts=(Host(name="localhost"),)))
    launcher.expect(of_script=False)
    local_agent.begin(of_script=False)
    yield launcher
    launcher.close()
    local_agent.forget()


def asked(launcher: LocalLauncher, turn: Turn) -> str:
    """Its answer to a request that changes nothing, or why there is none."""
    request = {"do": "standing", "identity": "me", "nodes": [{"identity": "me", "state_dir": "/nowhere"}]}
    answer = launcher.ask(request, turn=turn, timeout_s=20.0)["localhost"]
    return str(answer.value) if answer.value is not None else answer.output.note


@pytest.mark.slow
@ENDS
def test_one_that_is_gone_before_it_is_asked_is_replaced(launcher: LocalLauncher, number: int) -> None:
    begun = local_agent._begun[0]
    os.kill(begun._child.pid, number)
    assert "alive" in asked(launcher, "first")
    assert "alive" in asked(launcher, "last")


@ENDS
def test_one_that_is_gone_between_two_requests_is_replaced(launcher: LocalLauncher, number: int) -> None:
    begun = local_agent._begun[0]
    assert "alive" in asked(launcher, "first")
    os.kill(begun._child.pid, number)
    assert "alive" in asked(launcher, "next")
    assert "alive" in asked(launcher, "last")


def test_a_command_that_waits_for_another_one_holds_nothing_ready(launcher: LocalLauncher, tmp_path: Path) -> None:
    begun, folder = local_agent._begun[0], RunFolder(tmp_path / "0123456789ab")
    other = RunLock(folder)
    assert other.take()

    def said(line: str) -> None:
        told.append((line, begun._child.poll()))
        other.release()

    told: list[tuple[str, int | None]] = []
    with locked(folder, said, before_waiting=local_agent.forget):
        assert told == [("another command is training 0123456789ab; waiting for it", -signal.SIGKILL)]
