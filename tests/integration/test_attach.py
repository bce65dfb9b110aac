"""A controller that was killed: the hosts go on, and `doit attach` takes the training up where it is."""

from __future__ import annotations

import json

import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S

pytestmark = [pytest.mark.lab, pytest.mark.long]


def test_attach_takes_up_a_living_attempt_and_finishes_it(project: Project, lab: Lab) -> None:
    project.words = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "tracking=none"]
    words = ("experiment=quickstart", "trainer.epochs=120")
    none = project.doit("attach", *words)
    assert "is under way" in none.stdout or "not fetched" in none.stdout, none.stdout
    child = project.start("train", *words)
    wait_for_step(project, 40, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    project.words = ["tracking=none", f"cluster.ssh_config='{lab.ssh_config}'"]  # the run knows its hosts' names
    done = project.doit("attach", f"run={project.only_run().name[:6]}")
    assert done.returncode == 0, done.stdout
    assert "attached to attempt 1 on node0, node1" in done.stdout
    assert "resumed from step" not in done.stdout
    result = project.result()
    assert (result["state"], result["attempts"]) == ("FINISHED", 1)
    lines = (project.only_run() / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in lines]
    steps = [line["step"] for line in trained if "train/loss" in line["metrics"]]
    assert steps == sorted(set(steps)), "no line is lost or repeated"
    assert steps[-1] == result["steps"]
    log = (project.only_run() / "attempts" / "1" / "node0.log").read_text()
    assert log.count("epoch   1/120 ") == 1
    assert log.count("epoch 120/120 ") == 1
