"""A package beside the node half in a real run: what its rank sees, what an edit in it means, what it doesn't see."""

from __future__ import annotations

import json
import re
from dataclasses import replace
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


@pytest.mark.long  # of the agent with stub ranks: tests/pipeline/test_agent_supervisor.py
@pytest.mark.parametrize(
    ("ranks", "end", "said"),
    [
        (2, "if os.environ['RANK'] == '1': os._exit(0)", "rank 1: ended with exit code 0 before the run was over; "),
        *(
            (1, end, f"rank 0: {said}")
            for end, said in (
                ("os._exit(0)", "ended with exit code 0 before the run was over; take out what ends the process"),
                ("sys.exit()", r"SystemExit: \(it ends a process, and the run was not over; raise an Exception"),
                ("raise Mute", r"Mute: \(its text could not be made: ValueError\)"),
            )
        ),
    ],
)
def test_a_rank_that_ends_early_is_named_whatever_its_exit_code(
    tmp_path: Path, fetched: Path, ranks: int, end: str, said: str
) -> None:
    checkout = replace(copied(tmp_path / "project", fetched), whole=True)
    model = checkout.root / "trainers" / "models" / "small_cnn.py"
    mute = "class Mute(Exception):\n    def __str__(self) -> str:\n        raise ValueError\n"
    model.write_text(f"{model.read_text()}\n\nimport os, sys\n{mute}\n{end}\n")
    output = checkout.doit("train", *A, f"cluster.nproc_per_node={ranks}", code=1)
    assert re.search(f"ERROR: training failed on localhost, {said}", output), output
    assert output.count("Traceback") <= 1
    (journal,) = checkout.root.glob("runs/*/journal.jsonl")
    states = [json.loads(line)["state"] for line in journal.read_text().splitlines()]
    assert states == ["PLANNED", "RUNNING", "FAILED"]
