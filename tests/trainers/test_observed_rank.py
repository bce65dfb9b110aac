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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A project, and a file outside of it, which the models above read."""
    places = {"PACELINE_PROJECT": tmp_path / "project", "OUTSIDE": tmp_path / "outside.txt"}
    places["PACELINE_PROJECT"].mkdir()
    for path in (*(places["PACELINE_PROJECT"] / name for name in ("sizes.txt", "part1.txt")), places["OUTSIDE"]):
        path.write_text("8")
    for name, path in places.items():
        monkeypatch.setenv(name, str(path))
    return places


def trained(run_dir: Path, model: str = "", ranks: int = 1) -> str:
    """Train with a snapshot that holds ``model`` as mine.py; return what is printed."""
    shutil.copytree(ROOT / "trainers", run_dir / "code/trainers", ignore=shutil.ignore_patterns("__pycache__"))
    (run_dir / "code/mine.py").write_text(model)
    child = start(run_dir, ranks=ranks, path=run_dir / "code")
    printed, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return printed


def read_outside(run_dir: Path) -> list[str]:
    return [*json.loads((run_dir / "dependencies.json").read_text())["files"]]


OWN = {"model": {"name": "own", "target": "mine:Net", "args": {}}, "trainer__epochs": 1}


@pytest.mark.ci
@pytest.mark.long
def test_files_that_a_model_reads_and_its_own_text_are_named(make_run: MakeRun, files: dict[str, Path]) -> None:
    run_dir = make_run("own", **OWN)
    printed = trained(run_dir, NET)
    assert read_summary(run_dir)["unkeyed"] == {"mine.py": "read", "sizes.txt": "read"}
    assert "WARNING: the key is not complete: mine.py and sizes.txt were read; add them to model.inputs" in printed
    assert f"{files['OUTSIDE']} was read outside of the project" in printed
    assert read_outside(run_dir) == [str(files["OUTSIDE"])]


@pytest.mark.ci
@pytest.mark.long
def test_a_built_in_model_reads_nothing(make_run: MakeRun) -> None:
    run_dir = make_run("plain", trainer__epochs=1)
    assert "WARNING" not in trained(run_dir)
    assert "unkeyed" not in read_summary(run_dir)
    assert read_outside(run_dir) == []


@pytest.mark.ci
@pytest.mark.long
def test_what_another_rank_than_the_first_reads_counts_too(make_run: MakeRun, files: dict[str, Path]) -> None:
    run_dir = make_run("own", **OWN)
    (run_dir / ".seen/an-earlier-attempt-0").mkdir(parents=True)
    printed = trained(run_dir, OF_RANK_ONE, ranks=2)
    assert read_summary(run_dir)["unkeyed"] == {"part1.txt": "read"}
    assert "WARNING: the key is not complete: part1.txt was read; add it to model.inputs" in printed
    assert read_outside(run_dir) == [str(files["OUTSIDE"])]
    assert not (run_dir / ".seen").exists()
