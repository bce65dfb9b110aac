"""A training that goes on without the terminal that started it, and the commands that find it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from pipeline.cli.terminal import report_early_end
from pipeline.core.errors import PacelineError
from tests.integration.commands import ALONE, Project, processes_of, wait_for_step
from tests.waiting import HANG_S, wait_until

WORDS = ("experiment=quickstart", "tracking=none", *ALONE)


@pytest.mark.ci
@pytest.mark.long
def test_a_detached_training_is_found_waited_for_and_finished(project: Project) -> None:
    started = project.doit("train", *WORDS, "trainer.epochs=3", "detach=1", "json=1", apart=True)
    data = json.loads(started.stdout)["data"]
    assert os.getpgid(data["pid"]) == data["pid"] if Path(f"/proc/{data['pid']}").exists() else True
    waited = project.doit("wait", data["name"], "json=1", apart=True)
    row = json.loads(waited.stdout)["data"]
    assert (waited.returncode, row["key"], row["state"]) == (0, data["name"], "FINISHED")
    assert f"FINISHED {data['name']}: test/accuracy " in Path(data["log"]).read_text()
    followed = project.doit("logs", data["name"], "follow=1")
    assert "epoch 3/3" in followed.stdout


@pytest.mark.ci
@pytest.mark.long
def test_waiting_for_a_run_that_was_stopped_fails_with_its_state(project: Project) -> None:
    started = project.doit("train", *WORDS, "trainer.epochs=500", "detach=1", "json=1", apart=True)
    data = json.loads(started.stdout)["data"]
    metrics = project.folder / "runs" / data["name"] / "metrics.jsonl"
    wait_until(lambda: '"step": 20,' in _text(metrics))
    assert f"{data['name']} is stopped on localhost" in project.doit("stop", f"run={data['name']}").stdout
    waited = project.doit("wait", data["name"])
    assert waited.returncode == 1
    assert f"ERROR: run {data['name']} is KILLED\n  try: doit logs {data['name']}" in waited.stdout


@pytest.mark.long
def test_a_run_whose_command_was_killed_is_waited_for_as_long_as_its_hosts_may_go_on(project: Project) -> None:
    child = project.start("train", *WORDS, "trainer.epochs=5000", "cluster.lease_s=20")
    wait_for_step(project, 20, child)
    key = project.only_run().name
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    followed = project.start("logs", f"run={key}", "follow=1")
    waited = project.doit("wait", f"run={key}", apart=True)
    note = f"no command attends run {key}; its ranks may go on: doit attach {key}\n"
    assert waited.stderr.count(note) == 1
    assert f"ERROR: run {key} is RUNNING, but no command attends it\n  try: doit attach {key}" in waited.stderr
    assert waited.returncode == 1
    said = followed.communicate(timeout=HANG_S)[0]
    assert (followed.returncode, said.count(note)) == (0, 1)
    wait_until(lambda: not list(processes_of(project.folder)))  # by the lease, which is over


def test_a_detached_command_that_fails_at_once_says_why(tmp_path: Path) -> None:
    log = tmp_path / "0123.log"
    log.write_text("still composing\nERROR: no hosts\n")
    with pytest.raises(
        PacelineError, match=r"it ended at once, with 3:\nstill composing\nERROR: no hosts\n  try: less /"
    ):
        report_early_end(3, log)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
