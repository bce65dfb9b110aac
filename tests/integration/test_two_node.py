"""`doit train cluster=two_node` on two real SSH hosts: trains, collects, fails fast, and is not run twice."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project
from tests.integration.test_signal_moments import COLLECTING, WORDS, stopped_when
from tests.lab_fixture import on

pytestmark = pytest.mark.lab


@pytest.fixture
def project(project: Project, lab: Lab) -> Project:
    project.words = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "tracking=none"]
    return project


def ranks_on(lab: Lab) -> list[int]:
    """Processes of a training on the lab's hosts (they show in the controller's process table)."""
    found = []
    for process in psutil.process_iter():
        try:
            if "trainers.classifier" in process.cmdline() and str(lab.hosts[0].folder.parent) in str(process.environ()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_two_hosts_train_one_run_and_not_twice(project: Project, lab: Lab) -> None:
    words = ("train", "experiment=quickstart", "trainer.epochs=3")
    done = project.doit(*words)
    assert done.returncode == 0, done.stdout
    result = project.result()
    assert (result["hosts"], result["nnodes"], result["world_size"]) == (["node0", "node1"], 2, 2)
    plan = json.loads((project.only_run() / "plan.json").read_text())
    assert [node["address"] for node in plan["nodes"]] == [host.address for host in lab.hosts]
    samples = [json.loads(line) for line in (project.only_run() / "system_metrics.jsonl").read_text().splitlines()]
    assert {(sample["host"], sample["step"]) for sample in samples} >= {("node0", 0), ("node1", 0)}
    assert all(f"system/{sample['host']}/cpu_utilization_percentage" in sample["metrics"] for sample in samples)
    assert all(sample["metrics"][f"system/{sample['host']}/disk_available_megabytes"] > 0 for sample in samples)
    before = (project.only_run() / "journal.jsonl").read_bytes()
    again = project.doit(*words)
    assert again.returncode == 0
    assert "is finished" in again.stdout
    assert (project.only_run() / "journal.jsonl").read_bytes() == before
    left = on(lab, "node1", "ls ~/.cache/paceline/runs").stdout.split()
    assert [name for name in left if name.startswith(result["key"])] == []


@pytest.mark.long
def test_a_signal_while_the_outputs_are_brought_here_stands_in_the_journal(project: Project, lab: Lab) -> None:
    words = ("trainer.max_steps=3", "cluster.hosts=[{name: node1}]")
    done = stopped_when(project, COLLECTING, signal.SIGTERM, *words)
    assert done.returncode == 143
    assert "stopped by SIGTERM; no process of the run is left" in done.stdout
    assert project.states()[-1] == "KILLED"
    assert ranks_on(lab) == []
    done = project.doit("train", *WORDS, *words)
    assert done.returncode == 0, done.stdout
    assert project.states().count("RUNNING") == 1
    assert project.states()[-1] == "FINISHED"
