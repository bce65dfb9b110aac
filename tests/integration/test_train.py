"""`doit train` on this computer: from nothing to a recorded result, and not twice."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, ROOT, Project, interrupt, mlflow_states, processes_of, wait_for_step
from tests.integration.conftest import FINISHED
from tests.waiting import HANG_S, promised_s
from trainers.contract import run_folder

TINY = ("experiment=quickstart", "trainer.max_steps=2", *ALONE)
LONG = ("experiment=quickstart", "trainer.epochs=400", *ALONE, "tracking=none")


def test_the_quickstart_reaches_its_accuracy_and_is_not_run_twice(tmp_path: Path, database: Path) -> None:
    project = Project(tmp_path, whole=True)  # with nothing in it but tables, which take seconds to make
    shutil.copy(database, tmp_path)
    first = project.doit("train", "experiment=quickstart")
    assert first.returncode == 0, first.stdout
    result = project.result()
    assert result["metrics"]["test/accuracy"] >= 0.97
    assert (result["state"], result["nnodes"], result["world_size"]) == ("FINISHED", 1, 2)
    assert result["hosts"] == ["localhost"]
    assert len(result["weights_sha256"]) == 64
    assert mlflow_states(project) == ["FINISHED"]
    assert project.states() == ["PLANNED", "RUNNING", "FINISHED"]
    before = {path: path.stat().st_mtime_ns for path in project.only_run().rglob("*")}
    second = project.doit("train", "experiment=quickstart")
    assert second.returncode == 0
    assert "is finished: test/accuracy 0.9" in second.stdout
    assert {path: path.stat().st_mtime_ns for path in project.only_run().rglob("*")} == before
    assert _needless_work(project.argv("train", "experiment=quickstart")) == "0 []"
    project.whole = False
    why = project.doit("why", "experiment=quickstart", "optimizer.lr=0.2", "json=1", apart=True)
    assert json.loads(why.stdout)["data"]["differences"] == [
        {"part": "config", "field": "optimizer.lr", "old": 0.1, "new": 0.2}
    ]
    report = project.doit("evaluate", "run=" + result["key"][:6])
    assert "weighted avg" in report.stdout
    assert (project.only_run() / "evaluation" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


NEEDLESS = ("hydra", "mlflow", "numpy", "omegaconf", "optuna", "pipeline.cluster.attempt.run", "sklearn", "torch")
"""Modules that a finished `doit train` does without: its time is imports for the most part (benchmarks/peers.py)."""


def _needless_work(argv: list[str]) -> str:
    """The exit code of a finished `doit train` and what it imported of ``NEEDLESS``.

    Reading what a source imports, or its digest, would end it.
    """
    words = argv[argv.index("doit") + 1 :]
    code = (
        f"import sys; from doit.doit_cmd import DoitMain; sys.argv = ['doit', *{words!r}]; "
        "import pipeline.keys.readings; pipeline.keys.readings._parse = None; "
        f"print(DoitMain().run(sys.argv[1:]), [name for name in {NEEDLESS!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.ci
@pytest.mark.long
def test_an_altered_checkpoint_is_found_and_the_run_repeated_with_equal_weights(finished: Project) -> None:
    weights = finished.result()["weights_sha256"]
    final = finished.only_run() / "checkpoints" / "final.pt"
    good = final.read_bytes()
    final.write_bytes(good[:-1] + b"x")
    again = finished.doit("train", *FINISHED)
    assert again.returncode == 0, again.stdout
    assert finished.result()["weights_sha256"] == weights
    assert final.read_bytes() == good
    assert finished.states().count("RUNNING") == 2


def test_a_lost_report_is_made_again_without_training(finished: Project) -> None:
    (finished.only_run() / "evaluation" / "report.json").unlink()
    assert finished.doit("train", *FINISHED).returncode == 0
    assert (finished.only_run() / "evaluation" / "report.json").exists()
    assert finished.states().count("RUNNING") == 1


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_signal_ends_every_process_and_says_killed_and_the_same_command_resumes(
    project: Project, number: signal.Signals
) -> None:
    project.whole = number is signal.SIGINT
    child = project.start("train", *LONG)
    wait_for_step(project, 20, child)
    output, took_s = interrupt(child, number)
    assert took_s < promised_s(10)
    assert child.returncode == 128 + number
    assert "KILLED" in output
    assert "Traceback" not in output
    assert list(processes_of(project.folder)) == []
    assert project.states()[-1] == "KILLED"
    assert not (project.only_run() / "result.json").exists()
    log = (project.only_run() / "attempts/1/localhost.log").read_bytes()
    refused = project.doit("attach", project.only_run().name)  # there is nothing to follow, and nothing is touched
    assert (refused.returncode, "is under way: it is KILLED, stopped by " in refused.stdout) == (3, True)
    assert "try: its command again; it starts from the checkpoint of step " in refused.stdout
    assert (project.only_run() / "attempts/1/localhost.log").read_bytes() == log
    assert project.states()[-1] == "KILLED"


def test_stop_from_another_terminal_ends_the_run_which_is_not_started_again(project: Project) -> None:
    child = project.start("train", *LONG, "cluster.max_restarts=2")
    wait_for_step(project, 20, child)
    stopped = project.doit("stop", f"run={project.only_run().name}")
    what = f"{project.only_run().name} is stopped on localhost; the command that was attached ends as well\n"
    assert what in stopped.stdout
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 1, output
    assert "ERROR: KILLED" in output
    assert ": stopped by doit stop\n" in output
    assert "attempt 2" not in output
    assert not (project.only_run() / run_folder.STOP).exists()
    assert project.states()[-1] == "KILLED"
    assert list(processes_of(project.folder)) == []


@pytest.mark.ci
@pytest.mark.long
def test_stop_ends_what_a_killed_command_has_left_and_the_run_counts_as_ended(project: Project) -> None:
    child = project.start("train", *LONG)
    wait_for_step(project, 20, child)
    interrupt(child, signal.SIGKILL)
    key = project.only_run().name
    stopped = project.doit("stop", f"run={key}")
    step = max(int(path.stem[5:]) for path in (project.only_run() / "checkpoints").glob("step-*.pt"))
    start = f"typed again, it starts from the checkpoint of step {step}"
    assert f"{key} is stopped on localhost; no command was attached; {start}\n" in stopped.stdout
    assert list(processes_of(project.folder)) == []
    assert project.states()[-1] == "KILLED"
    assert "is stopped" not in project.doit("stop", f"run={key}").stdout


def test_killed_outright_the_same_command_finishes_with_the_weights_of_an_undisturbed_run(
    project: Project, finished: Project
) -> None:
    child = project.start("train", *FINISHED)
    wait_for_step(project, 40, child)
    interrupt(child, signal.SIGKILL)
    done = project.doit("train", *FINISHED)
    assert done.returncode == 0, done.stdout
    assert project.states().count("RUNNING") in (1, 2)  # 1: the ranks were at their last step when they were asked for
    assert project.result()["weights_sha256"] == finished.result()["weights_sha256"]
    assert list(processes_of(project.folder)) == []
    steps = [json.loads(line)["step"] for line in (project.only_run() / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr'; did you mean optimizer.lr=1?"),
        ([""], "argument 5 is empty"),
        (["trainer.global_batch_size=63"], "nearest that can: 62 or 64"),
    ],
)
def test_a_wrong_override_is_one_line_and_starts_nothing(project: Project, words: list[str], said: str) -> None:
    done = project.doit("train", *words)
    assert done.returncode == 3
    assert said in done.stdout
    assert len(done.stdout.strip().splitlines()) <= 2
    assert project.run_folders() == []


def test_a_bare_doit_shows_what_there_is_and_starts_nothing(project: Project) -> None:
    bare = [sys.executable, "-m", "doit"]  # with overrides and no command it is refused
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "doit train" in done.stdout
    assert [path.name for path in project.folder.glob("runs/*")] == [".paceline"]


@pytest.mark.ci
@pytest.mark.long
def test_synthetic_data_is_named_wherever_its_accuracy_shows(project: Project) -> None:
    words = (
        "dataset=synthetic",
        "model=small_cnn",
        "dataset.size=256",
        "dataset.val_size=32",
        "dataset.image_size=8",
        "trainer.max_steps=2",
        *ALONE,
    )
    done = project.doit("train", *words, "optimizer=adam", "tracking=none", "trainer.global_batch_size=32")
    assert done.returncode == 0, done.stdout
    finished = [line for line in done.stdout.splitlines() if line.startswith("FINISHED")]
    assert "SYNTHETIC DATA" in finished[0]
    assert project.result()["synthetic"] is True
    assert "SYNTHETIC DATA" in project.doit("runs").stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_server_that_is_down_costs_a_warning_and_the_same_command_records_later(recording: Project) -> None:
    done = recording.doit("train", *TINY, "tracking.uri=http://127.0.0.1:9")
    assert done.returncode == 0, done.stdout
    assert "not recorded in MLflow yet" in done.stdout
    assert recording.result()["mlflow_run_id"] is None
    key = recording.result()["key"]
    again = recording.doit("train", *TINY)
    assert f"{key} is not (all) recorded in " in again.stdout
    assert "WARNING" not in again.stdout
    assert recording.states().count("RUNNING") == 1
    recorded = recording.doit("record", f"run={key}")
    assert recorded.returncode == 0, recorded.stdout
    assert f"{key} is recorded as MLflow run" in recorded.stdout
    assert "recorded" not in recording.doit("train", *TINY).stdout


@pytest.mark.long
def test_hydras_own_multirun_trains_and_leaves_its_file_among_the_runs(project: Project) -> None:
    words = ["--multirun", "seed=3", *TINY, "tracking=none", "++cluster.env.API_TOKEN=in-no-file"]
    argv = [sys.executable, "-m", "pipeline", *words, *project.overrides]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.result()["state"] == "FINISHED"
    assert "++cluster.env.API_TOKEN=***" in (project.only_run() / "provenance.json").read_text()
    written = (project.folder / "runs" / ".multirun" / "multirun.yaml").read_text()
    assert "cluster.env.API_TOKEN" in written
    assert "in-no-file" not in written


@pytest.mark.long
def test_standard_streams_that_are_closed_end_no_run(project: Project) -> None:
    """A sweep's folder is opened by children."""
    command = f"exec {shlex.join(project.argv('sweep', *TINY, 'tracking=none'))} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=HANG_S, check=False).returncode == 0
    assert project.states() == ["PLANNED", "RUNNING", "FINISHED"]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("sweep", *FINISHED), b"1 finished, 0 failed; 0 run just now", marks=pytest.mark.long),
        (("train", *FINISHED, "optimizer.lr=…"), rb"optimizer.lr=\u2026"),
    ],
)
def test_a_standard_output_that_takes_ascii_alone_ends_no_command(
    finished: Project, words: tuple[str, ...], said: bytes
) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    argv = finished.argv(*words)
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=HANG_S)
    assert said in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr
