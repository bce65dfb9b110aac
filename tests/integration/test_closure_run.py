"""A package beside the node half in a real run: what its rank sees, what an edit in it means, what it doesn't see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_provenance import A, copied

MODEL = """

import sys
from mylib.scale import SCALE
print("SEES", SCALE, sys.path, flush=True)
"""


@pytest.mark.long
def test_a_rank_sees_the_snapshot_and_nothing_else_of_the_project(tmp_path: Path, fetched: Path) -> None:
    checkout = copied(tmp_path / "project", fetched)
    (checkout.root / "mylib").mkdir()
    scale = checkout.root / "mylib" / "scale.py"  # without __init__.py
    scale.write_text("SCALE = 1.0\n")
    (checkout.root / "hidden.py").touch()
    model = checkout.root / "trainers" / "models" / "small_cnn.py"
    source = model.read_text()
    model.write_text(source + MODEL)
    (said,) = {line.partition("SEES ")[2] for line in checkout.doit("train", *A).splitlines() if "SEES" in line}
    value, _, path = said.partition(" ")
    (key,) = checkout.runs()
    seen = json.loads(path.replace("'", '"'))
    assert (value, seen[0]) == ("1.0", f"{checkout.root}/runs/{key}/code")
    assert not {"", str(checkout.root), f"{checkout.root}/runs/{key}"} & {*seen}

    scale.write_text("SCALE = 7.0  # an edit\n")
    changes = checkout.why(*A)["differences"]
    assert [(item["part"], item["field"]) for item in changes] == [("code", "mylib/scale.py")]
    scale.write_text("SCALE = 1.0  # a comment\n")
    assert f"{key} is finished" in checkout.doit("train", *A)

    model.write_text(source + 'from importlib import import_module\nimport_module("hid" + "den")\n')
    failed = checkout.doit("train", *A, code=1)
    assert "ModuleNotFoundError: No module named 'hidden'" in failed
    model.write_text(source + "import gone_astray\n")
    refused = checkout.doit("train", *A, code=3)
    line = source.count("\n") + 1
    assert f"ERROR: trainers/models/small_cnn.py:{line} imports gone_astray: neither a file of the project" in refused
