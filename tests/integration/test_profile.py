"""`doit profile` on this computer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, Project


@pytest.mark.ci
@pytest.mark.long
def test_a_trace_holds_the_steps_that_were_asked_for(project: Project) -> None:
    done = project.doit("profile", "experiment=quickstart", *ALONE, "steps=2")
    assert done.returncode == 0, done.stdout
    (folder,) = project.folder.glob("runs/diagnostics/*-profile")
    assert "trace.json.gz" in done.stdout
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "paceline step" and event.get("ph") == "X" for event in events) == 2
    rows = json.loads((folder / "profile.json").read_text())["rows"]
    assert [row["calls_a_step"] for row in rows if row["name"] == "aten::convolution_backward"] == [2.0]


def test_steps_that_make_no_sense_start_nothing(tmp_path: Path) -> None:
    done = Project(tmp_path).doit("profile", "experiment=quickstart", "steps=none")
    assert done.returncode == 3
    assert "steps=none must be a whole number from 1" in done.stdout
    assert not list(tmp_path.glob("runs/diagnostics/*"))
