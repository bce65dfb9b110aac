"""--budget ends a training or a sweep in order, --max-trials a sweep after so many trials; the same command goes on."""

from __future__ import annotations

import json
import signal

import pytest

from tests.integration.commands import ALONE, Project

WORDS = ("experiment=quickstart", "tracking=none", *ALONE)
OUT_OF_TIME = 128 + signal.SIGALRM


@pytest.mark.ci
@pytest.mark.long
def test_a_training_is_ended_by_its_budget_with_a_checkpoint_and_goes_on_from_there(project: Project) -> None:
    words = (*WORDS, "trainer.epochs=100000", "trainer.checkpoint_every_epochs=100000")
    first = project.doit("train", *words, "--budget", "15s", "--json", apart=True)
    error = json.loads(first.stdout[first.stdout.index("\n{\n") :])["error"]
    assert (first.returncode, error["code"]) == (OUT_OF_TIME, "stopped")
    assert ": stopped by --budget 15s; no process of the run is left" in error["message"]
    (folder,) = project.run_folders()
    assert list((folder / "checkpoints").glob("step-*.pt")), error
    assert error["hint"].startswith("the same command again; it starts from the checkpoint of step ")
    assert json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])["state"] == "KILLED"
    assert project.doit("why", *words).stdout.startswith(f"{folder.name}: ")  # the budget is no part of the key


@pytest.mark.ci
@pytest.mark.long
def test_a_budget_ends_a_sweep_with_its_trials(project: Project) -> None:
    words = (*WORDS, "trainer.epochs=100000", "seed=0,1,2", "sweep.slots=1")
    done = project.doit("sweep", *words, "budget=15s")
    assert done.returncode == OUT_OF_TIME, done.stdout
    assert ": stopped by --budget 15s; no process of the run is left; 0 of 3 trials are finished (doit" in done.stdout
    assert "\n  try: the same command again; it goes on where this one was" in done.stdout
    entries = [json.loads(line) for line in next(project.folder.glob("runs/sweeps/*/journal.jsonl")).open()]
    assert (entries[-1]["state"], entries[-1]["detail"].partition(";")[0]) in {
        ("KILLED", f"KILLED {entries[-1]['key']}: stopped by --budget 15s"),
        ("KILLED", "stopped by --budget 15s"),
    }


@pytest.mark.ci
@pytest.mark.long
def test_so_many_trials_are_started_and_the_same_command_goes_on_with_the_others(project: Project) -> None:
    words = (*WORDS, "trainer.max_steps=2", "seed=0,1,2", "sweep.slots=1")
    first = project.doit("sweep", *words, "--max-trials", "2")
    assert first.returncode == 0, first.stdout
    assert ": 2 finished, 0 failed; 2 run just now\n  left     1 trial of 3; the same command goes on" in first.stdout
    second = project.doit("sweep", *words, "--max-trials", "2", "--json", apart=True)
    data = json.loads(second.stdout[second.stdout.index("\n{\n") :])["data"]
    assert (data["left"], [trial["state"] for trial in data["trials"]]) == (0, ["FINISHED"] * 3)
    search = (*WORDS, "trainer.max_steps=2", "optimizer.lr=interval(0.01,0.1)", "search=random", "search.n_trials=3")
    assert "\n  left     2 trials of 3; " in project.doit("sweep", *search, "max_trials=1").stdout
    assert "\n  left " not in project.doit("sweep", *search).stdout


def test_a_budget_or_number_that_is_none_is_refused(project: Project) -> None:
    for words, said in (
        (("train", "budget=30"), "--budget 30 is no duration\n  try: --budget 90s, 30m, 1h30m or 2d"),
        (("train", "budget=0s"), "--budget 0s is no duration"),
        (("sweep", "seed=1,2", "max_trials=0"), "max_trials=0 must be a whole number from 1"),
    ):
        done = project.doit(*words[:1], *WORDS, *words[1:])
        assert (done.returncode, said in done.stdout) == (3, True), done.stdout
    assert not project.run_folders()
