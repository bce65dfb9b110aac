"""`doit train trainer.shards=8`: begun on two hosts, ended on one, and the same run as on this computer."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import psutil
import pytest

from pipeline.lab import Lab, cut, restore
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S

pytestmark = [pytest.mark.lab, pytest.mark.long]

WORDS = ("train", "experiment=quickstart", "trainer.shards=8", "trainer.epochs=16", "trainer.checkpoint_every_steps=5")


def kill_ranks_of(lab: Lab, host: str) -> int:
    """How many there were."""
    inside = lab.host(host).init_pid
    assert inside is not None
    ranks = [
        process
        for process in psutil.Process(inside).children(recursive=True)
        if process.cmdline()[1:3] == ["-m", "trainers.classifier"]
    ]
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    return len(ranks)


def test_one_command_goes_on_without_a_host_that_is_gone(project: Project, lab: Lab) -> None:
    here = replace(project, folder=project.folder / "here", words=["tracking=none", "cluster.nproc_per_node=1"])
    hosts = replace(project, words=["tracking=none", f"cluster.ssh_config='{lab.ssh_config}'"])
    child = hosts.start(*WORDS, "cluster=two_node", "cluster.max_restarts=1", "cluster.min_nodes=1")
    try:
        wait_for_step(hosts, 20, child)
        cut(lab, "node1")
        said, _ = child.communicate(timeout=HANG_S)
    finally:
        child.kill()
        restore(lab, "node1")
    assert child.returncode == 0, said
    assert "going on without node1: 1 node, 1 rank" in said
    assert here.doit(*WORDS).returncode == 0
    assert here.result()["weights_sha256"] == hosts.result()["weights_sha256"]


def test_a_run_that_loses_a_host_for_good_ends_on_the_other_as_on_one_computer(project: Project, lab: Lab) -> None:
    here = replace(project, folder=project.folder / "here", words=["tracking=none", "cluster.nproc_per_node=4"])
    hosts = replace(project, words=["tracking=none", f"cluster.ssh_config='{lab.ssh_config}'"])
    child = hosts.start(*WORDS, "cluster=two_node")
    wait_for_step(hosts, 20, child)
    assert kill_ranks_of(lab, "node1") == 1
    said, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 1, said
    ended = hosts.doit(*WORDS, "cluster=pssh", "cluster.hosts=[{name: node0}]")
    assert ended.returncode == 0, ended.stdout
    assert "resumed from step" in ended.stdout
    assert "bit-identical" not in ended.stdout
    assert (hosts.result()["hosts"], hosts.result()["world_size"]) == (["node0"], 1)

    whole = here.doit(*WORDS)
    assert whole.returncode == 0, whole.stdout
    assert here.result()["world_size"] == 4
    for name in ("key", "weights_sha256", "metrics"):
        assert here.result()[name] == hosts.result()[name]
    found = replace(hosts, words=here.words).doit(*WORDS)
    assert f"{here.result()['key']} is finished" in found.stdout
