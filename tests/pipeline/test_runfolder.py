"""Finished and intact, or why not; the journal; a run found by its key."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import journal, runs
from pipeline.errors import UsageError, os_reason
from pipeline.files import sha256_file, write_json
from pipeline.key import ContentKey
from pipeline.runfolder import TARGETS, RunFolder
from pipeline.types import State

KEY = ContentKey(digest="0123456789abcdef" * 4, parts={"code": {}})


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / KEY.short)
    for name in TARGETS:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("some bytes")
    write_json(folder.path / "key.json", {})
    folder.write_result(
        key=KEY,
        summary={"metrics": {"test/accuracy": 0.5}},
        hosts=["a"],
        attempts=1,
        duration_s=1.0,
        mlflow_run_id=None,
    )
    return folder


def _altered(path: Path) -> None:
    path.write_text("same size!")


def _truncated(path: Path) -> None:
    os.truncate(path, 3)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_altered, "was altered"), (_truncated, "has 3 bytes, 10 were written"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_target_is_found(finished: RunFolder, name: str, damage: Callable[[Path], None], reason: str) -> None:
    assert finished.stale_because(KEY) is None
    damage(finished.path / name)
    assert finished.stale_because(KEY) == f"{name} {reason}"


def test_a_training_counts_as_done_only_with_the_outputs_it_left(finished: RunFolder) -> None:
    weights = finished.path / "checkpoints" / "final.pt"
    write_json(finished.path / "key.json", {"digest": KEY.digest})
    write_json(finished.path / "summary.json", {"state": "FINISHED"})
    write_json(finished.path / "checkpoints" / "final.json", {"sha256": sha256_file(weights)})
    assert finished.training_done(KEY)
    assert not finished.training_done(ContentKey(digest="f" * 64, parts={}))
    (finished.path / "predictions.json").write_text("same size!")
    assert not finished.training_done(KEY)
    finished.result.unlink()
    assert finished.training_done(KEY)
    weights.write_text("same size!")
    assert not finished.training_done(KEY)


def test_another_key_or_no_result_is_not_finished(finished: RunFolder) -> None:
    assert finished.stale_because(ContentKey(digest="f" * 64, parts={})) == "result.json belongs to another key"
    finished.result.write_text('{"torn')
    assert finished.stale_because(KEY) == "not finished yet"


def test_the_journal_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number, state in enumerate([State.PLANNED, State.RUNNING, State.FAILED], start=1):
        journal.append(path, journal.Entry(state=state, attempt=number, time=1.5, detail="ü\nx"))
    with path.open("a") as file:
        file.write('{"state": "FINI')
    assert [entry.state for entry in journal.read(path)] == ["PLANNED", "RUNNING", "FAILED"]
    assert journal.attempts(path) == 3


def test_a_line_after_a_torn_one_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal.append(path, journal.Entry(state=State.PLANNED, attempt=1, time=1.0))
    path.write_bytes(path.read_bytes() + b'{"state": "RUNN')
    journal.append(path, journal.Entry(state=State.KILLED, attempt=1, time=2.0))
    assert [entry.state for entry in journal.read(path)] == ["PLANNED", "KILLED"]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "key.json", {})
    assert os_reason(caught.value) == f"No space left on device ({tmp_path}/key.json)"
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_found_by_the_beginning_of_its_key(finished: RunFolder) -> None:
    assert runs.find(finished.path.parent, "0123") == finished
    assert [(row.key, row.state, row.accuracy) for row in runs.rows(finished.path.parent)] == [
        (KEY.short, "FINISHED", 0.5)
    ]
    with pytest.raises(UsageError, match="run=99: no such run"):
        runs.find(finished.path.parent, "99")
