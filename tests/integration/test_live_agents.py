"""A start's requests to agents that stay: real pssh, and a program in place of ssh that starts the agent here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.launchers import live_agents, pssh
from pipeline.cluster.launchers.agent_launcher import Turn
from pipeline.cluster.launchers.payload import BOOTSTRAP
from pipeline.cluster.launchers.pssh import PsshLauncher
from pipeline.core.specs import Cluster, Host
from tests.lab_fixture import require_lab
from tests.waiting import wait_until

SSH = f"""#!/bin/sh
for word; do test "$word" = -G && exit; test "$word" = -O && exit; done
echo $$ >>FOLDER/started
echo "$PATH" >FOLDER/path
grep -q broken FOLDER/mood && exit 255
grep -q greedy FOLDER/mood && cat >/dev/null
exec {sys.executable} -E -c "$BOOTSTRAP"
"""
EXAMINE = {"do": "examine", "gpu_s": 0.0}


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PsshLauncher]:
    """Of two hosts."""
    require_lab()  # pssh, and Linux
    (tmp_path / "mood").touch()
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.replace("FOLDER", str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("BOOTSTRAP", BOOTSTRAP)
    hosts = (Host(name="one"), Host(name="two", user="me"))
    with closing(PsshLauncher(Cluster(launcher="pssh", hosts=hosts))) as launcher:
        yield launcher
    assert all(not alive(pid) for pid in started(tmp_path))


@pytest.fixture
def ask(launcher: PsshLauncher) -> Callable[[Turn | None], dict[str, str | None]]:
    """Ask both hosts in one of a start's turns; their errors (None: there is none)."""
    return lambda turn: {label: answer.error for label, answer in launcher.ask(EXAMINE, turn=turn).items()}


def started(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "started").read_text().split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


WELL = {"one": None, "me@two": None}


def test_all_requests_of_a_start_are_answered_by_one_python_a_host(tmp_path: Path, ask: Any) -> None:
    turns: list[Turn] = ["first", "next", "next", "last"]
    assert [ask(turn) for turn in turns] == [WELL] * 4
    assert len(started(tmp_path)) == 2
    assert ask(None) == WELL
    assert len(started(tmp_path)) == 4


def test_more_hosts_than_one_pssh_can_watch_have_several(
    tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pssh, "MOST_HOSTS", 1)
    turns: list[Turn | None] = ["first", "next", "last", None]
    assert [ask(turn) for turn in turns] == [WELL] * 4
    assert len(started(tmp_path)) == 2 + 2


def test_hosts_of_different_interpreters_keep_their_agents_too(
    tmp_path: Path, launcher: PsshLauncher, ask: Any
) -> None:
    launcher._pythons = {"one": sys.executable}
    assert [ask("first"), ask("last")] == [WELL] * 2
    assert len(started(tmp_path)) == 2


def test_where_one_pssh_ends_at_once_the_hosts_of_the_others_still_answer(
    tmp_path: Path, launcher: PsshLauncher, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pssh, "MOST_HOSTS", 1)
    program = tmp_path / "bin" / "pssh"
    program.write_text(f'#!/bin/sh\ngrep -q two "$2" && exit 1\nexec {launcher._pssh} "$@"\n')
    program.chmod(0o755)
    launcher._pssh = str(program)
    assert ask("first") == {"one": None, "me@two": "pssh has not asked it"}


def test_what_ssh_starts_itself_finds_the_real_ssh(tmp_path: Path, ask: Any) -> None:
    ask("first")
    assert (tmp_path / "path").read_text().strip() == os.environ["PATH"]


def test_where_an_agent_is_gone_the_next_request_is_a_command_of_its_own(tmp_path: Path, ask: Any) -> None:
    ask("first")
    lost, waits = started(tmp_path)
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: not alive(lost))
    assert ask("last") == WELL
    assert len(started(tmp_path)) == 4
    assert not alive(waits)


def test_a_host_that_cannot_be_reached_keeps_no_other_waiting(tmp_path: Path, ask: Any) -> None:
    (tmp_path / "mood").write_text("broken")
    assert set(ask("first").values()) == {"no answer"}
    (tmp_path / "mood").write_text("")
    assert ask("next") == WELL


def test_a_login_that_reads_all_input_is_told_so(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_agents, "_SILENT_S", 0.1)
    (tmp_path / "mood").write_text("greedy")
    assert set(ask("first").values()) == {"paceline: no program came on standard input"}


def test_where_no_program_may_run_in_the_temporary_folder_each_request_is_a_command(
    tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [ask("first"), ask("last")] == [WELL, WELL]
    assert len(started(tmp_path)) == 4
