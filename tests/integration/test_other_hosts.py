"""A killed run goes on on another host: what still runs on the first one is ended, or told of, and never forgotten."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from pipeline.lab import Lab, cut, restore
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.long]


def ranks(key: str) -> Iterator[psutil.Process]:
    """The lab's processes show in the process table of this computer."""
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "trainers.classifier" in words and key in words:
            yield process


def test_what_a_killed_command_left_on_another_host_is_ended_and_gone_on_with(project: Project, lab: Lab) -> None:
    reached = f"cluster.ssh_config='{lab.ssh_config}'"
    project.words = [reached, "cluster=pssh", "tracking=none"]
    by_key = replace(project, words=[])  # the run knows its hosts, and not how they are reached
    words = ("train", "experiment=quickstart", "trainer.epochs=600", "trainer.checkpoint_every_steps=5")
    first = project.start(*words, "cluster.hosts=[node0]")
    wait_for_step(project, 40, first)
    first.kill()
    first.communicate(timeout=HANG_S)
    key = project.only_run().name
    assert [*ranks(key)], "they train on under their lease"
    asked = by_key.doit("stop", f"run={key}")
    assert f"run {key} was started with cluster.ssh_config, which is never taken from a run folder" in asked.stdout
    assert re.search(rf"doit stop {key} .*{re.escape(str(lab.ssh_config))}.* cluster=pssh", asked.stdout)
    by_key.words = [reached]

    cut(lab, "node0")
    try:
        second = project.start(*words, "cluster.hosts=[node1]")
        wait_until(lambda: [*project.only_run().glob("attempts/2/node1.log")], second)
        second.send_signal(signal.SIGINT)
        said, _ = second.communicate(timeout=HANG_S)
        refused = by_key.doit("stop", f"run={key}")
    finally:
        restore(lab, "node0")
    until = r"its ranks may train on until \d\d:\d\d:\d\d \(cluster.lease_s=600\)"
    assert re.search(rf"node0: attempt 1 was started there, and it could not be asked to stop \(.*\); {until}", said)
    assert refused.returncode == 1, refused.stdout
    assert re.search(rf"  node0: it could not be asked to stop \(.*\); {until}", refused.stdout)
    assert [*ranks(key)]

    third = project.start(*words, "cluster.hosts=[node1]")
    log = project.only_run() / "attempts" / "3" / "node1.log"
    wait_until(lambda: log.exists() and "resumed from step" in log.read_text(), third)
    third.send_signal(signal.SIGINT)
    third.communicate(timeout=HANG_S)
    resumed = re.search(r"resumed from step (\d+)", log.read_text())
    assert resumed is not None
    assert int(resumed[1]) >= 40, "the checkpoints of node0"
    assert not [*ranks(key)]
    assert f"nothing of {key} runs on node1\n" in by_key.doit("stop", f"run={key}").stdout
