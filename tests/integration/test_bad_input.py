"""What a person sees who gives `doit` something that can't work: one error, the right exit code, no traceback."""

from __future__ import annotations

import shutil

import psutil
import pytest

from tests.integration.commands import Project, wait_for_step


def test_a_folder_of_runs_that_cannot_be_made_is_one_error(project: Project) -> None:
    (project.folder / "runs").write_text("a file")
    done = project.doit("train", "experiment=quickstart", "tracking=none")
    assert done.returncode == 1
    assert f"File exists ({project.folder}/runs)\n  try: " in done.stdout
    assert "Traceback" not in done.stdout


def test_a_recorder_that_is_killed_loses_nothing_of_the_record(recording: Project) -> None:
    child = recording.start("train", "experiment=quickstart", "trainer.epochs=8", "cluster.nproc_per_node=1")
    wait_for_step(recording, 20, child)
    folder = recording.only_run()
    recorder = next(
        process
        for process in psutil.Process(child.pid).children()
        if {"pipeline.tracking", str(folder)} <= set(process.cmdline())
    )
    recorder.kill()
    output, _ = child.communicate(timeout=150)
    assert child.returncode == 0, output
    assert "not recorded" not in output
    assert recording.result()["mlflow_run_id"]


def test_the_record_of_a_run_without_an_end_says_so(finished: Project, recording: Project) -> None:
    shutil.copy(recording.folder / "mlflow.db", finished.folder)
    journal = finished.only_run() / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    done = finished.doit("record", f"run={finished.only_run().name}")
    assert done.returncode == 1
    assert "has not ended, its journal says RUNNING" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "run=nope"), "run=nope: no such run"),
        (("record", "run=nope"), "run=nope: no such run"),
        (("ui", "port=99999"), "port=99999 must be a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_word_that_only_the_verb_can_check_ends_with_the_code_of_a_wrong_command(
    project: Project, words: tuple[str, str], said: str
) -> None:
    done = project.doit(*words)
    assert done.returncode == 3
    assert said in done.stdout
    assert "Traceback" not in done.stdout
