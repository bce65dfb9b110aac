"""What a person sees who gives `doit` something that can't work: one error, the right exit code, no traceback."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.core.files import temporary_prefix
from tests.integration import preloaded
from tests.integration.commands import ALONE, ROOT, Project, mlflow_states, wait_for_step
from tests.small_disk import mounted
from tests.waiting import HANG_S

TINY = ("experiment=quickstart", "trainer.max_steps=2", *ALONE, "tracking=none", "seed=1,2")


def test_a_folder_of_runs_that_cannot_be_made_is_one_error(project: Project) -> None:
    shutil.rmtree(project.folder / "runs")
    (project.folder / "runs").write_text("a file")
    done = project.doit("train", "experiment=quickstart", "tracking=none")
    assert done.returncode == 3
    place = f"{project.folder}/runs"
    assert done.stdout == f"ERROR: paths.runs={place}: {place} is no folder; name one, or one that isn't there yet\n"


def test_a_sweep_whose_folder_cannot_be_made_is_one_error(project: Project) -> None:
    (project.folder / "runs/sweeps").write_text("a file")
    done = project.doit("sweep", *TINY)
    assert done.returncode == 1
    assert f"can't be kept in {project.folder}/runs/sweeps/" in done.stdout
    assert (
        "  try: make room or fix its permissions, then the same command; or paths.runs=<another folder>" in done.stdout
    )


@pytest.fixture
def small_disk(project: Project) -> Iterator[Path]:
    """The runs folder is a file system of 2 MiB."""
    shutil.rmtree(project.folder / "runs")
    with mounted(project.folder / "runs") as disk:
        yield disk


@pytest.mark.long
def test_a_sweep_on_a_disk_that_fills_goes_on_when_there_is_room(project: Project, small_disk: Path) -> None:
    words = ("sweep", "experiment=quickstart", "trainer.max_steps=2", *ALONE, "seed=0,1")
    full = project.doit(*words, "tracking=none")
    assert full.returncode == 1
    assert "ERROR: the sweep stopped before its end: " in full.stdout
    assert "No space left on device" in full.stdout
    # whoever found it full: a rank, the controller of the training, or the start of the next one
    free = (
        rf"  try: make room on the disk of {small_disk}, of which [\d,]+ bytes are free \(doit clean shows which runs "
    )
    assert re.search(rf"{free}may go\), then the same command; or paths.runs=", full.stdout), full.stdout
    assert "Traceback" not in full.stdout
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    done = project.doit(*words, "tracking=none")
    assert done.returncode == 0, done.stdout
    assert "2 finished, 0 failed" in done.stdout
    newer = project.run_folders()[0] / "key.json"
    newer.write_text(newer.read_text().replace('"version": 3', '"version": 4'))
    refused = project.doit(*words, "tracking=none")
    assert refused.returncode == 1
    assert "1 finished, 1 failed; 0 run just now" in refused.stdout
    assert f"run {newer.parent.name} was written by a newer Paceline" in refused.stdout


@pytest.mark.long
def test_a_recorder_that_is_killed_loses_nothing_of_the_record(recording: Project) -> None:
    child = recording.start("train", "experiment=quickstart", "trainer.epochs=8", *ALONE)
    wait_for_step(recording, 20, child)
    folder = recording.only_run()
    recorder = next(
        process
        for process in psutil.Process(child.pid).children()
        if {"pipeline.tracking", str(folder)} <= set(process.cmdline())
    )
    recorder.kill()
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 0, output
    assert mlflow_states(recording) == ["FINISHED"]


@pytest.mark.ci
@pytest.mark.long
def test_the_record_of_a_run_without_an_end_says_so(finished: Project, recording: Project) -> None:
    shutil.copy(recording.folder / "mlflow.db", finished.folder)
    journal = finished.only_run() / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    done = finished.doit("record", f"run={finished.only_run().name}")
    assert done.returncode == 1
    assert "has not ended, its journal says RUNNING" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_what_a_killed_command_left_is_removed_by_the_next_one_that_holds_the_lock(finished: Project) -> None:
    ended = subprocess.Popen(["true"])
    place, _, _ = temporary_prefix("").split(".")[1].split("-")
    left = [
        folder / f".config.json.{place}-{ended.pid:x}-1.abc"
        for folder in (finished.only_run(), finished.folder / "runs", finished.folder / "runs/.paceline")
    ]
    ended.wait()
    for path in left:
        path.write_text("half of it")
    done = finished.doit("evaluate", f"run={finished.only_run().name}")
    assert done.returncode == 0, done.stdout
    assert [path for path in left if path.exists()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "run=nope"), "nope: no such run"),
        (("reproduce", f"run={'a' * 300}"), ": no such run"),
        (("sweep", *TINY, "sweep.name='ünï code'"), "sweep.name='ünï code' must be up to 100 letters"),
        (("optimizer.lr=0.1",), "ERROR: no command is named; doit train "),
        (("ui", "port=99999"), "port=99999 must be a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_word_that_only_the_verb_can_check_ends_with_the_code_of_a_wrong_command(
    project: Project, words: tuple[str, ...], said: str
) -> None:
    done = project.doit(*words)
    assert done.returncode == 3
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_a_stop_with_nothing_to_stop_says_so(finished: Project) -> None:
    done = preloaded.doit("stop", f"paths.runs='{finished.folder}/runs'", apart=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"nothing to stop: no run under {finished.folder}/runs is under way"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["-S", "-m", "pipeline", "seed=1"],  # without site-packages, as a Python of the system
            f"ERROR: {sys.executable} has no module hydra: it is another Python than the project's\n"
            "  try: . .venv/bin/activate in the project's folder (make install makes it), then the same command\n",
        ),
        (
            ["dodo.py", "train"],
            "ERROR: doit reads this file, which does nothing by itself\n  try: doit train experiment=quickstart\n",
        ),
    ],
)
def test_a_command_for_another_python_or_without_doit_is_told_what_to_type(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)


def test_the_json_of_a_host_without_an_answer_has_the_message_and_hint_of_the_text() -> None:
    argv = [sys.executable, "-m", "doit", "preflight", "cluster=pssh", "cluster.hosts=[gpu1.invalid]", "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], answer["error"]["code"]) == (1, False, "hosts")
    assert answer["error"]["message"].startswith("probe: 1 of 1 hosts can't take part\n  gpu1.invalid: unreachable: ")
    assert answer["error"]["hint"] == "ssh gpu1.invalid true"
    assert [check["host"] for check in answer["data"]["checks"]] == ["gpu1.invalid"]


def test_a_source_that_fetch_refuses_is_refused_by_all_who_only_look(tmp_path: Path) -> None:
    words = ("experiment=quickstart", "dataset.source=https://host.invalid/a.npz")
    for verb in ("fetch", "plan", "status"):
        done = Project(tmp_path).doit(verb, *words)
        assert done.returncode == 1, (verb, done.stdout)
        assert done.stdout.endswith(
            "ERROR: dataset.source='https://host.invalid/a.npz' is of no use to dataset=digits: it needs no files\n"
            "  try: leave dataset.source out, or dataset=arrays for your own .npz\n"
        ), verb
