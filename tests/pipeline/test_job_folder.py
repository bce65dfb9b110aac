"""The folder through which a batch job's nodes and the controller speak: files that only grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cluster.agent.running.job import JobNode
from pipeline.cluster.launchers.job_folder import JobFolder
from tests.agent_records import job_request, start_request


def test_nodes_and_controller_speak_through_files_that_only_grow(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.make("#!/bin/bash\n", job_request(), 2)
    before = {path.name for path in folder.path.iterdir()}
    folder.start(0, start_request(run_id="a-1"))
    assert not folder.is_idle(0, 2)
    assert folder.is_idle(1, 2), "another restart of the job has nothing to do with it"
    for number in range(2):
        row = {"restart": 0, "now": 1.0, "facts": {"host": f"node{number}"}}
        end = {"restart": 0, "now": 2.0, "run_id": "a-1", "end": {"code": 0}}
        with (folder.path / f"node-{number}").open("a") as file:
            file.write(f"{json.dumps(row)}\n{json.dumps(end)}\n" + '{"cut')
    assert [fact["host"] for fact in folder.facts(0, 2)] == ["node0", "node1"]
    assert folder.facts(1, 2) == []
    assert folder.is_idle(0, 2)
    folder.leave(restart=0)
    assert not folder.was_left()
    folder.leave()
    assert folder.was_left()
    assert {path.name for path in folder.path.iterdir()} == before
    assert folder.script == "#!/bin/bash\n"


def test_a_job_folder_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.leave()
    assert (folder.script, folder.facts(0, 1), folder.output()) == ("", [], [])
    assert not folder.path.exists()


def test_a_node_that_does_not_share_the_folder_of_runs_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(SystemExit):
        JobNode(job_request(folder="/no/such/runs/0123456789ab/slurm/d4e5f6"))
    said = capsys.readouterr().err
    assert said.startswith("paceline: node1: /no/such/runs/0123456789ab/slurm/d4e5f6 isn't there; all nodes must share")
    assert "paths.runs" in said
