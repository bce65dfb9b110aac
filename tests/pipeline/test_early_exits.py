"""Ranks that end while their run is not over, by what they and torchrun leave."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pipeline.cluster.agent.running.rank_ends import EarlyExits


def test_a_rank_whose_end_only_torchrun_knows_gets_its_time_to_tell(tmp_path: Path) -> None:
    (tmp_path / "ranks/x/attempt_0/0").mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"ranks/x/attempt_0/0/running-{gone.pid}").touch()
    found = EarlyExits(str(tmp_path))
    assert (found.ranks(), found.torchrun_ends_others) == ({0: 0}, False)
    found.read("W1122 14:35:38 api.py:1010] Sending process 4194999 closing signal SIGTERM")
    assert found.torchrun_ends_others
    found.read(f"  exitcode  : -9 (pid: {gone.pid}) (SIGKILL)")
    assert found.ranks() == {0: -9}


def test_a_rank_that_begins_as_all_is_ended_has_not_ended_by_itself(tmp_path: Path) -> None:
    (tmp_path / "ranks/x/attempt_0/0").mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    killed, ended = EarlyExits(str(tmp_path)), EarlyExits(str(tmp_path))
    killed.torchrun_ended(-9)
    ended.about_to_end_all()
    (tmp_path / f"ranks/x/attempt_0/0/running-{gone.pid}").touch()
    killed.about_to_end_all()
    assert (killed.ranks(), ended.ranks()) == ({}, {})
