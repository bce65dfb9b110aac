"""What a model of one's own reads beside its key is seen in its rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trainers.tiny_runs import ROOT, MakeRun, read_summary, start

NET = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        sizes = Path(os.environ["PACELINE_PROJECT"], "sizes.txt").read_text(), Path(os.environ["OUTSIDE"]).read_text()
        self.last = nn.Linear(64, num_classes)
        open(__file__).close()

    def forward(self, images):
        return self.last(images.flatten(1))
"""


@pytest.mark.ci
@pytest.mark.long
def test_files_that_a_model_reads_and_its_own_text_are_said_and_a_built_in_one_reads_none(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside.txt"
    project.mkdir()
    for path in (project / "sizes.txt", outside):
        path.write_text("8")
    for name, value in (("PACELINE_PROJECT", project), ("OUTSIDE", outside)):
        monkeypatch.setenv(name, str(value))
    own = make_run("own", model={"name": "own", "target": "mine:Net", "args": {}}, trainer__epochs=1)
    plain = make_run("plain", trainer__epochs=1)
    for run_dir in (own, plain):
        shutil.copytree(ROOT / "trainers", run_dir / "code/trainers", ignore=shutil.ignore_patterns("__pycache__"))
    (own / "code/mine.py").write_text(NET)
    said = {}
    for run_dir in (own, plain):
        child = start(run_dir, path=run_dir / "code")
        said[run_dir], errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    assert read_summary(own)["unkeyed"] == {"mine.py": "read", "sizes.txt": "read"}
    wanted = "WARNING: the key is not complete: mine.py and sizes.txt were read; add them to model.inputs"
    assert wanted in said[own]
    assert f"{outside} was read outside of the project" in said[own]
    records = [json.loads((run_dir / "dependencies.json").read_text()) for run_dir in (own, plain)]
    assert [[*record["files"]] for record in records] == [[str(outside)], []]
    assert ("unkeyed" in read_summary(plain), "WARNING" in said[plain]) == (False, False)


OF_RANK_ONE = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.last = nn.Linear(64, num_classes)
        if os.environ["RANK"] == "1":
            Path(os.environ["PACELINE_PROJECT"], "part1.txt").read_text(), Path(os.environ["OUTSIDE"]).read_text()

    def forward(self, images):
        return self.last(images.flatten(1))
"""


@pytest.mark.ci
@pytest.mark.long
def test_what_another_rank_than_the_first_reads_counts_too(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside.txt"
    project.mkdir()
    for path in (project / "part1.txt", outside):
        path.write_text("8")
    for name, value in (("PACELINE_PROJECT", project), ("OUTSIDE", outside)):
        monkeypatch.setenv(name, str(value))
    run_dir = make_run("own", model={"name": "own", "target": "mine:Net", "args": {}}, trainer__epochs=1)
    (run_dir / ".seen/an-earlier-attempt-0").mkdir(parents=True)
    shutil.copytree(ROOT / "trainers", run_dir / "code/trainers", ignore=shutil.ignore_patterns("__pycache__"))
    (run_dir / "code/mine.py").write_text(OF_RANK_ONE)
    child = start(run_dir, ranks=2, path=run_dir / "code")
    said, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert read_summary(run_dir)["unkeyed"] == {"part1.txt": "read"}
    assert "WARNING: the key is not complete: part1.txt was read; add it to model.inputs" in said
    assert [*json.loads((run_dir / "dependencies.json").read_text())["files"]] == [str(outside)]
    assert not (run_dir / ".seen").exists()
