"""What a folder tells of its run, whatever state it was left in."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipeline.cli.commands.status import status
from pipeline.core.errors import UsageError
from pipeline.core.files import write_json
from pipeline.core.locks import held
from pipeline.core.specs import State
from pipeline.runs import index as runs
from pipeline.runs import journal, ranks
from pipeline.runs import status as progress
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import Entry
from tests.pipeline.conftest import Printed

KEY = "0123456789ab"


@pytest.fixture
def running(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / KEY)
    write_json(folder.path / "key.json", {"version": 1})
    write_json(folder.path / "config.json", {name: {"name": name} for name in ("dataset", "model", "optimizer")})
    write_json(folder.path / "plan.json", {"launcher": "pssh", "nodes": [{"host": "a", "nproc_per_node": 2}]})
    journal.append(folder.journal, Entry(state=State.RUNNING, attempt=2, time=0.0))
    lines = [
        '{"t": 1.0, "step": 1, "epoch": 1, "metrics": {"lr": 0.5}}',
        '{"t": 2.0, "step": 2, "epoch": 1, "metrics": {"train/loss": 2}}',
        '{"st',
    ]
    (folder.path / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_a_run_whose_command_died_says_so_and_one_that_is_held_does_not(running: RunFolder) -> None:
    assert "attempt 2; no command is attached: the command that started it goes on with it" in progress.status(running)
    with held(running.lock):
        shown = progress.status(running)
    assert shown.splitlines()[0] == f"{KEY}  dataset model optimizer"
    assert shown.splitlines()[1].endswith("attempt 2")
    assert (
        "  hosts    a (2), pssh\n  step     2, epoch 1\n  lr                   0.5\n  train/loss           2" in shown
    )


def test_the_answer_in_json_has_the_step_and_the_metrics_of_a_run_under_way(
    running: RunFolder, printed: Printed
) -> None:
    with held(running.lock):
        found = json.loads(printed(status, running.path.parent, KEY, "json=1"))["data"]
    assert (found["step"], found["epoch"], found["metrics"]) == (2, 1, {"lr": 0.5, "train/loss": 2.0})


def test_a_script_is_waited_for_wherever_it_goes_on_from(running: RunFolder) -> None:
    write_json(running.path / "config.json", {"program": {"name": "script", "args": {"resume": "{resume}"}}})
    journal.register_attempt(running.path, "second")
    waits = "running the script; no logged metric so far, no line either"
    assert ranks.under_way(running) == waits  # rows of the first attempt are there
    (running.path / "metrics.jsonl").unlink()
    assert ranks.under_way(running) == waits
    log = running.path / "attempts" / "2" / "a.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("0 | step 40\n0 | 40/99\r\x1b[32mstep 50\x1b[0m loss 0.3\n\n")
    os.utime(log, (time.time() - 7.2,) * 2)
    with held(running.lock):
        assert (
            "  step     none yet: no logged metric so far, its last line came 7 s ago: step 50 loss 0.3\n"
            in progress.status(running)
        )


def test_a_run_that_is_just_being_prepared_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / KEY)
    write_json(folder.path / "key.json", {"version": 1})
    with held(folder.lock):
        assert progress.status(folder).splitlines()[:3] == [
            f"{KEY}  (no config.json yet)",
            "  state    PLANNED, its command is preparing it",
            "  hosts    not asked yet",
        ]
    write_json(folder.path / "config.json", {"cluster": {"launcher": "pssh"}})
    assert "  state    PLANNED, not started\n  hosts    not asked yet, pssh\n" in progress.status(folder)


def test_a_resumed_run_is_starting_until_its_own_metrics_come(running: RunFolder) -> None:
    path = running.path / "metrics.jsonl"
    path.unlink()
    journal.register_attempt(running.path, "first")
    assert ranks.under_way(running).startswith("waiting for the first step; ")
    line = '{"t": 1.0, "step": %d, "epoch": 1, "metrics": {}, "attempt": "%s"}\n'
    path.write_text(line % (40, "first"))
    assert ranks.under_way(running) == "training, last reported step 40"
    journal.register_attempt(running.path, "second")
    assert ranks.under_way(running).startswith("starting again from the beginning; the ranks import torch")
    (running.path / "checkpoints").mkdir()
    for name in ("step-00000019.pt", "step-00000038.pt"):
        (running.path / "checkpoints" / name).touch()
    assert ranks.under_way(running).startswith("starting again from the checkpoint of step 38; the ranks import")
    path.write_text(line % (39, "second"))
    assert ranks.under_way(running) == "training, last reported step 39"
    with path.open("a") as file:
        file.write(line.replace(', "attempt"', ', "doing": "evaluating on the test split", "attempt"') % (40, "second"))
    assert ranks.under_way(running) == "evaluating on the test split, last reported step 40"
    with held(running.lock):
        assert "  step     40, epoch 1, evaluating on the test split" in progress.status(running)
    assert "  step     40, epoch 1\n" in f"{progress.status(running)}\n"


@pytest.mark.parametrize(
    "line",
    ["\0" * 40, "[1, 2]", "null", '{"step": 9}', '{"t": 1, "step": "9", "epoch": 1, "metrics": {}}', "[" * 60_000],
)
def test_a_damaged_line_of_metrics_is_named_and_costs_no_other(running: RunFolder, line: str) -> None:
    path = running.path / "metrics.jsonl"
    first, second, _ = path.read_text().splitlines()
    odd = '{"t": 3.0, "step": 3, "epoch": 1, "metrics": {"train/loss": "much", "lr": true, "val/loss": 4}}'
    path.write_text("\n".join([first, line, second, odd, ""]))
    shown = progress.status(running)
    assert (
        "  step     3, epoch 1\n  lr                   0.5\n  train/loss           2\n  val/loss             4" in shown
    )
    assert shown.endswith("  metrics.jsonl line 2 is not readable and was left out")


def test_logs_come_attempt_by_attempt_and_a_host_may_be_chosen(running: RunFolder) -> None:
    with pytest.raises(UsageError, match=r"has no logs: attempt 2 was started, but no log is left in .*/attempts"):
        list(progress.logs(running, None))
    for attempt, host in ((2, "a"), (10, "a"), (2, "b")):
        path = running.path / "attempts" / str(attempt) / f"{host}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{attempt}{host}\n")
    assert list(progress.logs(running, "a")) == ["==> attempt 2, a <==", "2a", "==> attempt 10, a <==", "10a"]
    with pytest.raises(UsageError, match="host=c: run 0123456789ab has no log of it; valid: a, b"):
        list(progress.logs(running, "c"))


def test_a_run_is_found_by_its_mlflow_id_and_one_of_a_newer_version_is_listed_and_refused(running: RunFolder) -> None:
    mlflow_id = "f" * 32
    write_json(running.path / "tracking.json", {"run_id": mlflow_id})
    assert runs.find(running.path.parent, mlflow_id) == running
    write_json(running.path / "key.json", {"version": 99})
    with pytest.raises(UsageError, match="was written by a newer Paceline"):
        runs.find(running.path.parent, KEY)
    write_json(running.result, {"what": "x", "unix_time": 1.0, "state": "FINISHED"})
    assert [(row.key, row.state) for row in runs.rows(running.path.parent)] == [(KEY, runs.NEWER)]
    assert runs.finished_parts(running.path.parent) == {}
