"""`doit profile` on this computer."""

from __future__ import annotations

import gzip
import json

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
