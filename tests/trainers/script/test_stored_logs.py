"""Metrics that a pattern finds in the stored log of a script that has ended."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trainers.script.runs import ScriptRun
from trainers.core.files import sha256_file
from trainers.script.metrics.recorder import add_matches

PATTERN = r"step (?P<step>\d+) loss (?P<loss>\S+)"


def log(run: ScriptRun, attempt: int, *lines: str) -> None:
    folder = run.path / "attempts" / str(attempt)
    folder.mkdir(parents=True)
    (folder / "node0.log").write_text("".join(f"{line}\n" for line in lines))


def test_a_pattern_that_is_given_later_reads_the_log_and_an_earlier_ones_metrics_make_way(tmp_path: Path) -> None:
    run = ScriptRun(project=tmp_path / "project", path=tmp_path / "run")
    run.write("import paceline; paceline.log(1, accuracy=0.5)\n").start()
    (run.path / "plan.json").write_text("{}")
    log(run, 1, "0 | step 1 loss 9")
    log(run, 2, "0 | step 1 loss 4", "1 | step 1 loss 7", "0 | step 2 loss nan", "- | step 9 loss 9")
    add_matches(run.path, PATTERN)
    assert run.rows() == [(1, {"accuracy": 0.5}), (1, {"loss": 4.0})]
    summary = run.read("summary.json")
    assert (summary["metrics"], summary["steps"]) == ({"accuracy": 0.5, "loss": 4.0}, 1)
    assert summary["outputs_sha256"]["metrics.jsonl"] == sha256_file(run.path / "metrics.jsonl")
    add_matches(run.path, r"step \d+ (?P<other>l)?oss (?P<cost>\d+)", PATTERN)
    assert run.rows() == [(1, {"accuracy": 0.5}), (1, {"cost": 4.0})]


def test_of_a_script_that_goes_on_from_checkpoints_all_attempts_count_without_what_was_logged_again(
    tmp_path: Path,
) -> None:
    run = ScriptRun(project=tmp_path / "project", path=tmp_path / "run")
    run.write("", args={"resume": "{resume}"}).start()
    (run.path / "plan.json").write_text(json.dumps({"run_id": "k-1"}))
    log(run, 1, "0 | step 1 loss 4", "0 | step 2 loss 3", "0 | step 3 loss 2")
    log(run, 2, "0 | step 3 loss 1")
    add_matches(run.path, PATTERN)
    assert run.rows() == [(1, {"loss": 4.0}), (2, {"loss": 3.0}), (3, {"loss": 1.0})]
