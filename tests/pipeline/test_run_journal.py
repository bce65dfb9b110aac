"""The journal of a run, and the ids of its attempts: what a damaged line or file costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.specs import State
from pipeline.runs import journal
from trainers.contract import run_folder


@pytest.mark.parametrize(
    "line",
    [
        '{"state": "FINISHED", "attempt": null, "time": 1.0}',
        '{"state": "FINISHED", "attempt": "1", "time": 1.0}',
        '{"state": "FINISHED", "attempt": 1, "time": 1e300}',
        '{"state": "FINISHED", "attempt": 1, "time": 1e17}',
        '{"state": "FINISHED", "attempt": 1, "time": NaN}',
        '{"state": "FINISHED", "attempt": 1, "time": ' + "9" * 400 + "}",
        '{"state": {}, "attempt": 1, "time": 1.0}',
        "[" * 100_000,
        "null",
    ],
)
def test_a_journal_line_of_wrong_types_costs_no_other(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    journal.append(path, journal.Entry(state=State.RUNNING, attempt=2, time=1.0))
    path.write_text(f"{line}\n{path.read_text()}")
    assert [entry.attempt for entry in journal.read(path)] == [2]
    assert journal.attempts(path) == 2


def test_a_line_after_a_torn_one_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal.append(path, journal.Entry(state=State.PLANNED, attempt=1, time=1.0))
    path.write_bytes(path.read_bytes() + b'{"state": "RUNN')
    assert [entry.state for entry in journal.read(path)] == ["PLANNED"]
    journal.append(path, journal.Entry(state=State.KILLED, attempt=3, time=2.0, detail="ü\nx"))
    assert [entry.state for entry in journal.read(path)] == ["PLANNED", "KILLED"]
    assert journal.attempts(path) == 3


def test_ids_begin_alike_for_one_folder_and_differ_between_clones(tmp_path: Path) -> None:
    for key in ("k" * 12, "2026-all-reduce-3f"):
        prefix = journal.attempt_prefix(key, tmp_path)
        ids = [journal.new_attempt_id(key, tmp_path, number, "aaaaaa") for number in (1, 12)]
        assert [journal.prefix_of_attempt(one) for one in ids] == [prefix, prefix]
        assert [journal.attempt_number(one) for one in ids] == [1, 12]
        assert journal.attempt_prefix(key, tmp_path / "clone") != prefix


@pytest.mark.parametrize("text", ["", "\0\0", "[]", "7", '{"attempts": 3}', '{"attempts": {"a": 1}}', '{"other": []}'])
def test_a_damaged_file_names_no_attempt(tmp_path: Path, text: str) -> None:
    (tmp_path / run_folder.ATTEMPT_IDS).write_text(text)
    assert journal.known_attempts(tmp_path) == []
    for run_id in "ab":
        journal.register_attempt(tmp_path, run_id)
    assert journal.known_attempts(tmp_path) == ["a", "b"]
