"""FSDP on two real SSH hosts that share nothing: a rank is killed, and the next attempt goes on."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S

pytestmark = [pytest.mark.lab, pytest.mark.long]


def test_the_next_attempt_goes_on_from_the_checkpoint_of_both_hosts(project: Project, lab: Lab) -> None:
    hosts = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "tracking=none"]
    project.words = [*hosts, "strategy=fsdp", "cluster.max_restarts=1"]
    child = project.start("train", "experiment=quickstart", "trainer.epochs=12")
    wait_for_step(project, 40, child)
    inside = lab.host("node1").init_pid
    assert inside is not None
    victims = [p for p in psutil.Process(inside).children(recursive=True) if "--config" in p.cmdline()]
    os.kill(victims[-1].pid, signal.SIGKILL)
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 0, output
    assert "resumed from step" in output
    result = project.result()
    assert (result["state"], result["attempts"], result["hosts"]) == ("FINISHED", 2, ["node0", "node1"])
