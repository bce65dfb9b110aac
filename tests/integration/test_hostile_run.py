"""A finished run whose JSON files hold hostile values: what train, evaluate, record and report make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import Project
from tests.integration.conftest import FINISHED
from tests.pipeline.test_hostile_folder import fill, hostile

FILES = (
    "attempts.json", "attempts/1/hardware.json", "attempts/1/localhost.exit.json", "attempts/1/ranks.json",
    "checkpoints/final.json", "config.json", "dependencies.json", "evaluation/report.json", "journal.jsonl", "key.json",
    "metrics.jsonl", "plan.json", "predictions.json", "provenance.json", "result.json", "summary.json",
    "tracking.json",
)  # fmt: skip


@pytest.mark.long  # the verbs that only read: tests/pipeline/test_hostile_folder.py
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_error_or_mended_and_nothing_that_it_names_is_run(
    name: str, finished: Project, tmp_path: Path
) -> None:
    evil, precious = tmp_path / "evil.sh", tmp_path / "precious"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    evil.chmod(0o755)
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    folder = finished.only_run()
    path = folder / name
    text = path.read_text() if path.exists() else ""
    fill(path, text, [*hostile(evil, precious).values()][(FILES.index(name) + 3) % len(FILES)])
    key = f"run={folder.name}"
    for words in (("report", folder.name), ("record", key), ("evaluate", key), ("train", *FINISHED)):
        done = finished.doit(*words)
        assert ("Traceback" in done.stdout, "unexpected" in done.stdout) == (False, False), (words, done.stdout)
    assert done.returncode == 0, done.stdout
    assert "is finished" in finished.doit("train", *FINISHED).stdout
    assert not (tmp_path / "ran").exists()
    assert [(item.name, item.read_text()) for item in precious.iterdir()] == [("thesis.tex", "years")]
