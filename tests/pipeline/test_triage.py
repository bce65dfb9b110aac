"""What `doit triage` says of a failed run: what, where, the evidence and the next command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import triage
from pipeline.comparing.groups import command_line
from pipeline.runs.folder import RunFolder
from tests.pipeline.comparing_folders import failed
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import CONFIG, finished, key_of

TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: no such column"


@pytest.fixture
def triaged(printed: Printed) -> Printed:
    return partial(printed, triage.triage)


def data(triaged: Printed, runs_dir: Path, *words: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(triaged(runs_dir, *words, "json=1"))["data"]
    return value


def ended(run: RunFolder, host: str, rank: int, unix_time: float, traceback: str, message: str = "x") -> None:
    """Write that a rank of the first attempt ended with an error."""
    folder = run.path / "attempts" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    error = {"rank": rank, "unix_time": unix_time, "message": message, "traceback": traceback}
    (folder / f"{host}.exit.json").write_text(json.dumps({"host": host, "code": 1, "errors": [error]}))


def test_the_first_error_of_all_hosts_is_named_with_its_traceback_and_log(tmp_path: Path, triaged: Printed) -> None:
    run = failed(tmp_path)
    ended(run, "node0", 0, 20.0, "a later one")
    ended(run, "node1", 3, 10.0, TRACEBACK)
    (run.path / "attempts/1/node1.log").write_text("3 | epoch 1\n" * 10_000 + "3 | the end\n")
    found = data(triaged, tmp_path, run.key[:6])
    assert (found["key"], found["state"]) == (run.key, "FAILED")
    assert found["where"] == "node1 rank 3, node0 rank 0"
    assert found["evidence"]["traceback"] == TRACEBACK
    assert found["evidence"]["log of node1"].endswith("epoch 1\nthe end")
    assert found["next"].startswith("fix what it names, then doit train ")
    assert len(json.dumps(found)) < 4_000  # about a thousand tokens


def test_without_a_key_the_newest_run_that_did_not_finish_is_examined(tmp_path: Path, triaged: Printed) -> None:
    run = failed(tmp_path)
    finished(tmp_path)
    assert data(triaged, tmp_path)["key"] == run.key


@pytest.mark.parametrize(
    ("config", "field"),
    [({**CONFIG, "program": {"name": "script", "script": "train.py"}}, "program.inputs"), (CONFIG, "model.inputs")],
)
def test_of_a_finished_run_with_an_incomplete_key_that_is_said(
    tmp_path: Path, triaged: Printed, config: dict[str, Any], field: str
) -> None:
    (tmp_path / key_of(config).short).mkdir()
    (tmp_path / key_of(config).short / "outputs.json").write_text("{}")
    finished(tmp_path, config=config, summary={"unkeyed": {"lr.txt": "read"}})
    found = data(triaged, tmp_path)
    assert found["next"].startswith(f"its key is not complete: lr.txt was read; add it to {field}: ")


def test_a_finished_run_needs_nothing(tmp_path: Path, triaged: Printed) -> None:
    run = finished(tmp_path)
    found = data(triaged, tmp_path)
    assert (found["key"], found["failed"], found["next"]) == (run.key, "", "nothing: it is FINISHED")


@pytest.mark.parametrize(
    ("reason", "trace", "mend"),
    [
        ("ModuleNotFoundError: No module named 'timm'", "", "install what brings timm on the hosts, or put it into"),
        ("ended with signal 9 (SIGKILL)", "", "give it more memory, or a smaller batch, then doit train"),
        ("OSError: [Errno 28] No space left on device", "", "free space on node1; doit clean says"),
        ("EOFError: EOF when reading a line", "", "a run has no keyboard: let the script take the answer"),
        ("train.py: error: unrecognized arguments: --detach", "", "--detach is an option of this command"),
        ("ValueError: x", '  File "/a/{key}/code/me.py", line 7, in f\n    f()\nValueError: x', "fix me.py, line 7"),
    ],
)  # fmt: skip
def test_the_next_step_mends_what_failed(tmp_path: Path, triaged: Printed, reason: str, trace: str, mend: str) -> None:
    run = failed(tmp_path, why=f"training failed on node1, rank 3: {reason}")
    ended(run, "node1", 3, 10.0, trace.format(key=run.key))
    assert data(triaged, tmp_path, run.key)["next"].startswith(mend)


def test_the_next_command_finds_the_runs_where_this_one_found_them(tmp_path: Path) -> None:
    place = (f"paths.runs={tmp_path}",)
    words = ("experiment=quickstart", "paths.runs=elsewhere")
    assert command_line("train", words, place) == f"doit train paths.runs={tmp_path} experiment=quickstart"
    line = command_line("train", ("program.script=train.py", "cluster.nproc_per_node=2"), place)
    assert line.startswith(f"doit torchrun paths.runs={tmp_path} ")
    assert line.endswith(" train.py")


def test_a_rank_that_only_lost_its_peer_is_not_blamed(tmp_path: Path, triaged: Printed) -> None:
    run = failed(tmp_path)
    ended(run, "node0", 0, 10.0, "x", message="RuntimeError: Connection closed by peer [127.0.0.1]:3")
    ended(run, "node1", 3, 20.0, "x", message="ended with signal 11 (SIGSEGV)")
    assert data(triaged, tmp_path)["where"] == "node1 rank 3"


def test_of_a_hang_the_rank_that_the_verdict_names_is_shown_with_its_log(tmp_path: Path, triaged: Printed) -> None:
    why = "training failed: no rank has moved for 15 s: rank 1 on node1 hangs in the script: it sleeps; node0 waits"
    run = failed(tmp_path, why=why)
    ended(run, "node0", 0, 10.0, "x", message="ended with signal 15 (SIGTERM)")
    attempt = run.path / "attempts" / "1"
    (attempt / "node0.log").write_text("0 | at work\n")
    (attempt / "node1.log").write_text("1 | waits for the data server\n")
    found = data(triaged, tmp_path)
    assert found["where"] == "node1 rank 1"
    assert found["evidence"]["log of node1"] == "waits for the data server"
    assert found["next"].startswith(f"see what it waits for: doit logs paths.runs={tmp_path} {run.key}, then ")


def test_where_torchrun_could_not_start_its_own_lines_are_the_evidence(tmp_path: Path, triaged: Printed) -> None:
    run = failed(tmp_path, why="training failed on node1: torchrun ended with exit code 1")
    (run.path / "attempts" / "1").mkdir(parents=True)
    (run.path / "plan.json").write_text(json.dumps({"nodes": [{"host": "node1"}]}))
    (run.path / "attempts" / "1" / "node1.log").write_text("- | Traceback\n- | ImportError: libcudart.so.13\n")
    assert data(triaged, tmp_path)["evidence"]["log of node1"].endswith("ImportError: libcudart.so.13")
