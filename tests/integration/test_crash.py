"""A controller that dies outright, and many at once: nothing is lost, nothing done twice. More: benchmarks/crash.py."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from tests.integration.commands import ALONE, Project, mlflow_states, processes_of, wait_for_step
from tests.integration.conftest import FINISHED
from tests.waiting import HANG_S, wait_until

WORDS = ("experiment=quickstart", "trainer.max_steps=2", *ALONE)


@pytest.mark.ci
@pytest.mark.long
def test_killed_between_training_and_result_the_same_command_trains_nothing_again(project: Project) -> None:
    """That MLflow gets what it has missed: tests/integration/test_train.py."""
    project.words = ["tracking=none"]
    child = project.start("train", *WORDS)
    wait_until(lambda: list(project.folder.glob("runs/*/summary.json")), child)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=HANG_S)
    assert not (project.only_run() / "result.json").exists()
    done = project.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    assert project.states().count("RUNNING") == 1
    assert project.states()[-1] == "FINISHED"
    assert list(processes_of(project.folder)) == []


@pytest.mark.long
def test_a_removed_run_folder_mixes_nothing_into_the_next_run(project: Project, finished: Project) -> None:
    """Twice: with the command alive, and with it and the agent killed before, so that only the ranks are left."""
    words = (*FINISHED, "trainer.checkpoint_every_steps=10")
    for kill in (False, True):
        child = project.start("train", *words)
        wait_for_step(project, 20, child)
        run_dir = project.only_run()
        ranks = list(processes_of(project.folder))
        assert ranks
        if kill:
            state = next(run_dir.glob("attempts/*/agent-*/agent.json"))
            os.kill(child.pid, signal.SIGKILL)
            os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)
        shutil.rmtree(run_dir, ignore_errors=True)
        output = child.communicate(timeout=HANG_S)[0]
        if not kill:
            assert f"training failed on localhost: the run's folder {run_dir} was removed while the run" in output
            assert "\nlogs: " not in output
            assert [rank.pid for rank in ranks if rank.is_running()] == []
        done = project.doit("train", *words)
        assert done.returncode == 0, done.stdout
        assert [rank.pid for rank in ranks if rank.is_running()] == []
        known = json.loads((run_dir / "attempts.json").read_text())["attempts"]
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert {line["attempt"] for line in lines} <= set(known)
        assert project.result()["weights_sha256"] == finished.result()["weights_sha256"]
        shutil.rmtree(run_dir)


@pytest.mark.long
def test_many_commands_at_once_lose_nothing_and_do_nothing_twice(recording: Project) -> None:
    done = recording.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    children = [recording.start("train", *WORDS, f"seed={number % 2}") for number in range(8)]
    outputs = [child.communicate(timeout=HANG_S)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 8, outputs
    results = list(recording.folder.glob("runs/*/result.json"))
    assert len(results) == 2
    for path in results:
        assert (path.parent / "journal.jsonl").read_text().count("RUNNING") == 1
    assert mlflow_states(recording) == ["FINISHED", "FINISHED"]
