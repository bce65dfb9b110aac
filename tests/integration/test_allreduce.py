"""`doit allreduce`: here, and over two real SSH hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project
from tests.lab_fixture import on

QUICK = ("allreduce", "max_bytes=64K", "iterations=2")


def result(project: Project) -> dict[str, Any]:
    (path,) = project.folder.glob("runs/diagnostics/*-allreduce/allreduce.json")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


@pytest.mark.ci
@pytest.mark.long
def test_two_local_ranks_without_a_data_pack(tmp_path: Path) -> None:
    project = Project(tmp_path)
    words = ("trainer.global_batch_size=63", "++cluster.env.OMP_NUM_THREADS=1")  # two ranks couldn't share the batch
    done = project.doit(*QUICK, *words)
    assert done.returncode == 0, done.stdout
    assert "every sum right" in done.stdout
    assert [row["wrong_elements"] for row in result(project)["rows"]] == [0] * 8
    assert not (tmp_path / "data").exists()
    assert "no runs under" in project.doit("runs").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["min_bytes=1M", "max_bytes=1K"], "none is larger than max_bytes"),
        (["iterations=0"], "iterations=0 must be a whole number from 1"),
    ],
)
def test_options_that_make_no_sense_start_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    done = Project(tmp_path).doit("allreduce", *words)
    assert done.returncode == 3
    assert said in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.lab
@pytest.mark.long
def test_two_hosts_tell_who_they_are_and_leave_nothing(tmp_path: Path, lab: Lab) -> None:
    project = Project(tmp_path, ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'"])
    done = project.doit(*QUICK)
    assert done.returncode == 0, done.stdout
    assert "rank 1  node 1  node1  cpu" in done.stdout
    found = result(project)
    assert [(card["rank"], card["host"]) for card in found["ranks"]] == [(0, "node0"), (1, "node1")]
    assert (found["nnodes"], found["world_size"]) == (2, 2)
    for host in ("node0", "node1"):
        assert "allreduce" not in on(lab, host, "ls ~/.cache/paceline/runs").stdout
