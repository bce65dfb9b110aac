"""A controller that dies outright, and many at once: nothing is lost, nothing done twice. More: benchmarks/crash.py."""

from __future__ import annotations

import os
import signal
import sqlite3
import time

from tests.integration.commands import Project, processes_of

WORDS = ("experiment=quickstart", "trainer.max_steps=2", "cluster.nproc_per_node=1")


def mlflow_states(project: Project) -> list[str]:
    with sqlite3.connect(project.folder / "mlflow.db") as database:
        rows = database.execute("select status from runs where lifecycle_stage = 'active'").fetchall()
    return [str(row[0]) for row in rows]


def test_killed_between_training_and_result_the_same_command_trains_nothing_again(recording: Project) -> None:
    child = recording.start("train", *WORDS)
    deadline = time.monotonic() + 90
    while not list(recording.folder.glob("runs/*/summary.json")):
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert not (recording.only_run() / "result.json").exists()
    done = recording.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    assert recording.states().count("RUNNING") == 1
    assert recording.states()[-1] == "FINISHED"
    assert mlflow_states(recording) == ["FINISHED"]
    assert list(processes_of(recording.folder)) == []


def test_many_commands_at_once_lose_nothing_and_do_nothing_twice(recording: Project) -> None:
    done = recording.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    children = [recording.start("train", *WORDS, f"seed={number % 2}") for number in range(8)]
    outputs = [child.communicate(timeout=170)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 8, outputs
    results = list(recording.folder.glob("runs/*/result.json"))
    assert len(results) == 2
    for path in results:
        assert (path.parent / "journal.jsonl").read_text().count("RUNNING") == 1
    assert mlflow_states(recording) == ["FINISHED", "FINISHED"]
