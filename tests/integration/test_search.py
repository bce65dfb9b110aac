"""A search from its command line to its end: real ranks, Optuna's real storage, MLflow's real store."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, Project, processes_of
from tests.waiting import HANG_S, wait_until

SEARCH = [
    "experiment=quickstart",
    *ALONE,  # how two ranks leave together: tests/trainers/test_pruned.py
    "trainer.epochs=16",
    "trainer.checkpoint_every_epochs=10",
    "search=grid",
    "search.seed=3",  # the bad rate comes last
    "search.pruner=median",
    "search.startup_trials=2",
    "search.warmup_epochs=1",
    "optimizer.lr=0.03,0.1,1e-7",
]

GOOD = (*SEARCH, "search.n_trials=2")  # so that both are told before the bad rate is trained


def sweep_folder(project: Project) -> Path:
    (folder,) = (path.parent for path in (project.folder / "runs" / "sweeps").glob("*/sweep.json"))
    return folder


def journal(project: Project) -> Iterator[dict[str, object]]:
    for path in (project.folder / "runs" / "sweeps").glob("*/journal.jsonl"):
        yield from (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def agreed(project: Project) -> dict[int, str]:
    """The state of each trial, by number, after a look whether journal, study and MLflow say the same."""
    folder = sweep_folder(project)
    last = {int(str(entry["number"])): str(entry["state"]) for entry in journal(project)}
    told = {number: state for number, state in rows(folder / "search.db", "select number, state from trials")}  # noqa: C416
    assert told == {number: {"FINISHED": "COMPLETE"}.get(state, state) for number, state in last.items()}
    query = (
        "select k.value, r.status, t.value from runs r join tags t on t.run_uuid = r.run_uuid "
        "join tags k on k.run_uuid = r.run_uuid where t.key = 'paceline.state' and k.key = 'paceline.run_key'"
    )
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    by_key = {str(item["key"]): last[item["number"]] for item in trials}
    status = {"PRUNED": "KILLED"}  # MLflow has no word of its own
    assert sorted(rows(project.folder / "mlflow.db", query)) == sorted(
        (key, status.get(state, state), state) for key, state in by_key.items()
    )
    return last


def check_pruned(project: Project) -> None:
    """The bad rate alone was pruned; its run, and all three stores, say so."""
    folder = sweep_folder(project)
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [item["number"] for item in trials] == [0, 1, 2]
    (bad,) = (item for item in trials if item["chosen"] == ["optimizer.lr=1e-07"])
    run = project.folder / "runs" / bad["key"]
    pruned = json.loads((run / "pruned.json").read_text())
    assert pruned["epoch"] < 16
    assert (run / "checkpoints" / f"step-{pruned['step']:08d}.pt").exists()
    assert not (run / "result.json").exists()

    again = project.doit("sweep", *SEARCH)
    assert (again.returncode, "0 run just now" in again.stdout) == (0, True), again.stdout
    last = agreed(project)  # now: `doit sweep` waits a while for its recorders, and records later what they have missed
    assert {number for number, state in last.items() if state == "PRUNED"} == {bad["number"]}


@pytest.mark.ci
@pytest.mark.long
def test_a_search_prunes_the_bad_rate_and_all_three_stores_agree(recording: Project) -> None:
    first = recording.doit("sweep", *GOOD)
    assert first.returncode == 0, first.stdout
    done = recording.doit("sweep", *SEARCH)
    assert done.returncode == 0, done.stdout
    assert "search=grid, 3 trials of which 2 have begun, 1 at a time, pruner median" in done.stdout
    assert "2 finished, 1 pruned, 0 failed" in done.stdout
    check_pruned(recording)


@pytest.mark.long
def test_a_killed_search_goes_on_and_prunes_the_bad_rate_and_all_three_stores_agree(recording: Project) -> None:
    project = recording
    child = project.start("sweep", *GOOD)
    try:
        wait_until(lambda: sum(entry["state"] == "RUNNING" for entry in journal(project)) >= 2, child)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=HANG_S)
        resumed = project.doit("sweep", *GOOD)
        assert resumed.returncode == 0, resumed.stdout
        done = project.doit("sweep", *SEARCH)
        assert done.returncode == 0, done.stdout
        assert "search=grid, 3 trials of which 2 have begun, 1 at a time, pruner median" in done.stdout
        assert "2 finished, 1 pruned, 0 failed" in done.stdout
    finally:
        for process in processes_of(project.folder):
            process.kill()
    check_pruned(project)


def test_a_wrong_search_ends_as_a_wrong_command_line(tmp_path: Path) -> None:
    words = ("experiment=quickstart", "search=tpe", "search.trials=3", "optimizer.lr=1,2")
    done = Project(tmp_path).doit("sweep", *words)
    assert (done.returncode, "did you mean search.n_trials=3?" in done.stdout) == (3, True), done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_search_without_a_tracking_server_is_recorded_later_and_a_pruned_run_is_not_run_again(
    recording: Project,
) -> None:
    """Hyperband; eight draws from three rates, so that runs, pruned ones too, are drawn again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"tracking.uri=http://127.0.0.1:{probe.getsockname()[1]}"
    project = recording
    words = [word for word in SEARCH if not word.startswith(("search=", "search.", "optimizer"))]
    words += ["search=random", "search.seed=4", "search.n_trials=8", "search.pruner=hyperband"]
    words += ["optimizer.lr=0.03,0.1,1e-7", *ALONE]
    first = project.doit("sweep", *words, nobody)
    assert first.returncode == 0, first.stdout
    assert "WARNING: not recorded in MLflow yet" in first.stdout
    assert f"; {len(project.run_folders())} run just now" in first.stdout
    started = [entry["number"] for entry in journal(project) if entry["state"] == "RUNNING"]
    assert set(started) == {0, 1, 2}

    again = project.doit("sweep", *words)
    assert again.returncode == 0, again.stdout
    assert "3 run(s) whose record was missing are recorded now" in again.stdout
    assert "0 run just now" in again.stdout
    states = agreed(project)
    assert states[2] == states[3] == states[6] == states[7] == "PRUNED"
    assert [entry["number"] for entry in journal(project) if entry["state"] == "RUNNING"] == started
