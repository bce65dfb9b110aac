"""A training that goes on without the terminal that started it, and the commands that find it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.cli.commands.train import ended_at_once
from pipeline.core.errors import PacelineError
from tests.integration.commands import ALONE, Project
from tests.waiting import wait_until

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


def test_a_detached_command_that_fails_at_once_says_why(tmp_path: Path) -> None:
    log = tmp_path / "0123.log"
    log.write_text("still composing\nERROR: no hosts\n")
    with pytest.raises(
        PacelineError, match=r"it ended at once, with 3:\nstill composing\nERROR: no hosts\n  try: less /"
    ):
        ended_at_once(3, log)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
