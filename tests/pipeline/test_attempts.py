"""Which attempts of a run count."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.runs import journal
from trainers.contract import run_folder


def test_ids_begin_alike_for_one_folder_and_differ_between_clones(tmp_path: Path) -> None:
    first, second = (
        journal.new_attempt_id("k" * 12, tmp_path, 1, "aaaaaa"),
        journal.new_attempt_id("k" * 12, tmp_path, 12, "bbbbbb"),
    )
    assert (
        journal.prefix_of_attempt(first)
        == journal.prefix_of_attempt(second)
        == journal.attempt_prefix("k" * 12, tmp_path)
    )
    assert journal.attempt_prefix("k" * 12, tmp_path / "clone") != journal.attempt_prefix("k" * 12, tmp_path)
    assert journal.prefix_of_attempt(journal.new_attempt_id("2026-all-reduce-3f", tmp_path, 1, "c")).startswith(
        "2026-all-reduce-3f-"
    )


def test_the_newest_is_the_last_one_and_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    assert journal.known_attempts(tmp_path) == []
    journal.register_attempt(tmp_path, "a")
    journal.register_attempt(tmp_path, "b")
    assert journal.known_attempts(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "\0\0", "[]", "7", '{"attempts": 3}', '{"attempts": {"a": 1}}', '{"other": []}'])
def test_a_damaged_file_names_no_attempt(tmp_path: Path, text: str) -> None:
    (tmp_path / run_folder.ATTEMPT_IDS).write_text(text)
    assert journal.known_attempts(tmp_path) == []
