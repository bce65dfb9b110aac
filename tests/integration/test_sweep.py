"""Sweeps for real: one failure stops nothing, one signal ends all, and a controller that is killed loses nothing."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.lab import Lab
from tests.integration.commands import ALONE, ROOT, Project, interrupt, processes_of, see_recorded, wait_for_step
from tests.waiting import HANG_S, promised_s

TINY = ("experiment=quickstart", "trainer.max_steps=8")


def sweep_folder(project: Project) -> Path:
    (folder,) = (path.parent for path in (project.folder / "runs" / "sweeps").glob("*/sweep.json"))
    return folder


def states(project: Project) -> list[tuple[int, str]]:
    lines = (sweep_folder(project) / "journal.jsonl").read_text().splitlines()
    return [(entry["number"], entry["state"]) for entry in map(json.loads, lines)]


def recorded(project: Project) -> list[tuple[str, str]]:
    """Run key and status of every run in MLflow's database."""
    see_recorded(project)
    with sqlite3.connect(project.folder / "mlflow.db") as database:
        return sorted(
            database.execute(
                "select tags.value, runs.status from runs join tags using (run_uuid) "
                "where tags.key = 'paceline.run_key' and runs.lifecycle_stage = 'active'"
            ).fetchall()
        )


def weights(project: Project) -> dict[str, str]:
    results = (json.loads((folder / "result.json").read_text()) for folder in project.run_folders())
    return {result["key"]: result["weights_sha256"] for result in results}


def test_a_sweep_with_a_bad_value_finishes_the_rest_and_is_not_run_twice(recording: Project) -> None:
    project = recording
    words = (*TINY, "optimizer.lr=1e38,0.1,0.10", *ALONE, "sweep.slots=1")
    planned = project.doit("sweep", *words, "dry_run=1")
    assert planned.returncode == 0, planned.stdout
    first = project.doit("sweep", *words)
    assert first.returncode == 1, first.stdout
    assert "2 trials (1 more were the same run as another), 1 at a time" in first.stdout
    assert "1 finished, 1 failed; 2 run just now" in first.stdout
    assert "ERROR: 1 of 2 trials failed (the table above names them), the first, trial 0: training" in first.stdout
    assert re.search(
        r"\n\nFAILED: training failed on localhost.*\n  trial 0  \w{12}  optimizer.lr=1e\+38", first.stdout
    )
    assert "Traceback" not in first.stdout.partition(" configurations")[2]
    assert [status for _, status in recorded(project)].count("FINISHED") == 1
    assert list(processes_of(project.folder)) == []
    before = (sweep_folder(project) / "journal.jsonl").read_bytes()
    again = project.doit("sweep", *words)
    assert again.returncode == 1
    assert "0 run just now" in again.stdout
    assert (sweep_folder(project) / "journal.jsonl").read_bytes() == before
    report = json.loads(project.doit("report", "json=1", apart=True).stdout)["data"]
    assert [(group["n"], group["of"]) for group in report["configurations"]] == [(0, 1), (1, 1)]
    repeated = project.doit(*shlex.split(report["best"]["command"])[1:])
    assert f"{report['best']['key']} is finished" in repeated.stdout
    multirun = [sys.executable, "-m", "pipeline", "--multirun", *TINY, "optimizer.lr=0.1", *ALONE]
    hydra = subprocess.run(
        [*multirun, *project.overrides], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert hydra.returncode == 0, hydra.stderr
    assert "1 finished, 0 failed; 0 run just now" in hydra.stdout


@pytest.mark.long
def test_a_signal_ends_every_trial_and_the_same_command_goes_on(project: Project) -> None:
    project.words = ["tracking=none", *ALONE, "sweep.slots=2"]
    words = ("sweep", "experiment=quickstart", "trainer.epochs=400", "seed=0,1,2")
    child = project.start(*words)
    wait_for_step(project, 20, child)
    output, took_s = interrupt(child, signal.SIGINT)
    assert took_s < promised_s(10)
    assert child.returncode == 130
    assert "KILLED sweep" in output
    assert "Traceback" not in output
    assert list(processes_of(project.folder)) == []
    assert states(project)[-2:] in ([(0, "KILLED"), (1, "KILLED")], [(1, "KILLED"), (0, "KILLED")])
    listed = project.doit(*words, "dry_run=1").stdout
    assert listed.count("KILLED before") == 2
    assert "not finished yet" in listed


@pytest.mark.lab
@pytest.mark.long
def test_a_controller_killed_twice_loses_and_repeats_nothing(
    recording: Project, tmp_path_factory: pytest.TempPathFactory, lab: Lab
) -> None:
    """Each trial on a host of its own; the weights are those of an undisturbed sweep."""
    where = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "sweep.nodes=1"]
    words = ("sweep", "experiment=quickstart", "trainer.epochs=8", "seed=range(2)")
    undisturbed = Project(tmp_path_factory.mktemp("undisturbed"), [*where, "tracking=none"])
    disturbed = recording
    disturbed.words = where
    for step in (1, 40):
        child = disturbed.start(*words)
        wait_for_step(disturbed, step, child)
        interrupt(child, signal.SIGKILL)
    for project in (undisturbed, disturbed):
        done = project.doit(*words)
        assert done.returncode == 0, done.stdout
    assert [status for _, status in recorded(disturbed)] == ["FINISHED"] * 2
    assert weights(disturbed) == weights(undisturbed)
    assert len(weights(disturbed)) == 2
    assert list(processes_of(disturbed.folder)) == []
    assert attempts_after_the_end(disturbed) == []


def attempts_after_the_end(project: Project) -> list[Any]:
    """Runs whose journal says that they were started again after they had finished."""
    found = []
    for folder in project.run_folders():
        entries = [json.loads(line)["state"] for line in (folder / "journal.jsonl").read_text().splitlines()]
        found += [folder.name] if "RUNNING" in entries[entries.index("FINISHED") :] else []
    return found
