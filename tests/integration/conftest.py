"""What many tests begin with and few are about: a data pack, an MLflow database, a finished run. Made once, copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, Project, with_readings
from tests.shared_fixture import made_once

FINISHED = ("experiment=quickstart", "trainer.epochs=10", *ALONE, "tracking=none")
"""How the run of ``finished`` was made."""


@pytest.fixture(scope="session")
def fetched(shared: Path) -> Path:
    """A folder of data with the quickstart's, to copy: fetching it imports scikit-learn. ``with_readings`` needs it."""

    def fetch(folder: Path) -> None:
        for verb in ("fetch", "plan"):
            done = Project(folder).doit(verb, "experiment=quickstart")
            assert done.returncode == 0, done.stdout

    return made_once(shared / "pack", fetch) / "data"


@pytest.fixture
def project(tmp_path: Path, fetched: Path, request: pytest.FixtureRequest) -> Project:
    """A project in the test's folder that has the quickstart's data already. No stand-ins in the long tests."""
    with_readings(fetched, tmp_path)
    return Project(tmp_path, whole=request.node.get_closest_marker("long") is not None)


@pytest.fixture
def recording(project: Project, database: Path) -> Project:
    """``project`` with an MLflow database."""
    shutil.copy(database, project.folder)
    return project


@pytest.fixture
def finished(tmp_path: Path, shared: Path) -> Project:
    """A project of the test's own in which ``doit train`` has finished FINISHED (it may be altered)."""

    def train(folder: Path) -> None:
        done = Project(folder).doit("train", *FINISHED)
        assert done.returncode == 0, done.stdout

    original = made_once(shared / "finished run", train)
    return Project(Path(shutil.copytree(original, tmp_path / "finished", symlinks=True)))
