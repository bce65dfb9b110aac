"""Rank 0's host is lost in the midst of a training: a spare goes on from the checkpoint that was brought here."""

from __future__ import annotations

import re

import pytest

from pipeline.lab import Lab, cut, restore
from tests.integration.commands import Project
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.long]


def test_a_spare_takes_the_place_of_rank_0s_host_and_its_checkpoint_is_here(project: Project, lab: Lab) -> None:
    where = [
        f"cluster.ssh_config='{lab.ssh_config}'",
        "cluster.hosts=[{name: node0}]",
        "cluster.spares=[{name: node1}]",
    ]
    project.words = [
        "cluster=pssh",
        *where,
        "cluster.max_restarts=1",
        "cluster.checkpoint_fetch_s=0.1",
        "tracking=none",
    ]
    child = project.start("train", "experiment=quickstart", "trainer.epochs=300")
    try:
        wait_until(lambda: [*project.folder.glob("runs/*/checkpoints/step-*.json")], child)
        cut(lab, "node0")
        output, _ = child.communicate(timeout=HANG_S)
    finally:
        child.kill()
        restore(lab, "node0")
    assert child.returncode == 0, output
    assert "node1 takes the place of node0, as node 0" in output
    found = re.search(r"starting attempt 2 of 2 from the checkpoint of step (\d+)", output)
    assert found is not None, output
    assert f"resumed from step {found[1]}" in output
    result = project.result()
    assert (result["state"], result["attempts"], result["hosts"]) == ("FINISHED", 2, ["node1"])
