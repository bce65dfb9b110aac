"""A project with a run folder in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.script.runs import ScriptRun


@pytest.fixture
def run(tmp_path: Path) -> ScriptRun:
    """Nothing is in it yet."""
    return ScriptRun(project=tmp_path / "project", path=tmp_path / "project" / "runs" / "0123456789ab")
