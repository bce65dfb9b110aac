"""A lab host on which attempts that are over have left their folders: preflight and `doit clean hosts=1`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.lab import Lab
from pipeline.runs import journal
from tests.integration.commands import Project
from tests.lab_fixture import on

pytestmark = pytest.mark.lab
KEY = "abcdef012345"


@pytest.fixture
def runs(lab: Lab) -> Iterator[Path]:
    """The folder of runs on node1."""
    path = lab.hosts[1].home / ".cache" / "paceline" / "runs"
    yield path
    on(lab, "node1", "rm -rf ~/.cache/paceline/runs ~/.cache/paceline/agents")


def leave(lab: Lab, run_id: str, *, pid: int, born: str = "7") -> None:
    """What an attempt leaves on node1, two hours ago; the process ``pid`` is its agent."""
    host, place = lab.hosts[1], f".cache/paceline/runs/{run_id}/node1"
    folder, registry = host.home / place, host.home / ".cache" / "paceline" / "agents"
    entry = {
        "run_key": KEY,
        "run_id": run_id,
        "pid": pid,
        "born": born,
        "mark": f"{run_id}:1",
        "identity": f"node1 {host.address}:22 uid {os.getuid()}",
        "state_dir": str(Path.home() / place / "agent"),
    }
    for made in (folder / "agent", folder / "checkpoints", registry):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "step-1.pt").touch()
    for path in (folder / "agent" / "agent.json", registry / f"{run_id}.1.json"):
        path.write_text(json.dumps(entry))
    then = time.time() - 7200
    for path in (folder / "checkpoints", folder / "agent", folder):
        os.utime(path, (then, then))


@pytest.mark.ci
@pytest.mark.long  # what a host tells, removes and keeps: tests/pipeline/test_leftover.py
def test_what_no_agent_holds_and_no_run_needs_is_removed_by_preflight_and_by_clean(
    lab: Lab, runs: Path, tmp_path: Path
) -> None:
    project = Project(tmp_path, ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'"])
    run_dir = tmp_path / "runs" / KEY
    run_dir.mkdir(parents=True)
    alive, superseded, wanted = (journal.new_attempt_id(KEY, run_dir, number, "aa") for number in (1, 2, 3))
    for run_id in (alive, superseded, wanted):
        journal.register_attempt(run_dir, run_id)
        leave(lab, run_id, pid=999999)
    leave(lab, alive, pid=1, born=on(lab, "node1", "cut -d' ' -f22 /proc/1/stat").stdout.strip())

    done = project.doit("preflight")
    assert done.returncode == 0, done.stdout
    assert "node1: removed what was left of 1 attempt, " in done.stdout
    assert {path.name for path in runs.iterdir() if path.name.startswith(KEY)} == {wanted, alive}
    agents = {path.name for path in (runs.parent / "agents").glob(f"{KEY}*")}  # other tests' hosts have theirs there
    assert agents == {f"{wanted}.1.json", f"{alive}.1.json"}

    leave(lab, superseded, pid=999999)
    done = project.doit("clean", "hosts=1")
    assert f"node1: {wanted}/node1 stays: run {KEY} goes on from its checkpoints" in done.stdout
    assert "node1  " in done.stdout
    assert "nothing was removed; to remove what was left of 1 attempt, " in done.stdout
    assert {path.name for path in runs.iterdir() if path.name.startswith(KEY)} == {superseded, wanted, alive}
    done = project.doit("clean", "hosts=1", "yes=1")
    assert done.returncode == 0, done.stdout
    assert {path.name for path in runs.iterdir() if path.name.startswith(KEY)} == {wanted, alive}
