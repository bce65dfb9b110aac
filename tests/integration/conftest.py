"""What many tests begin with and few are about: a data pack, an MLflow database, a finished run. Made once, copied."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.core.locks import held
from tests.integration.commands import ALONE, ROOT, Project
from tests.waiting import HANG_S

FINISHED = ("experiment=quickstart", "trainer.epochs=10", *ALONE, "tracking=none")
"""How the run of ``finished`` was made."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this call of pytest share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """``folder`` with what ``make`` puts there, by the first worker that asks for it."""
    made = Path(f"{folder}.made")
    with held(Path(f"{folder}.lock")):
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def fetched(shared: Path) -> Path:
    """A folder of data with the quickstart's, to copy: fetching it imports scikit-learn."""

    def fetch(folder: Path) -> None:
        done = Project(folder).doit("fetch", "experiment=quickstart")
        assert done.returncode == 0, done.stdout

    return made_once(shared / "pack", fetch) / "data"


@pytest.fixture
def project(tmp_path: Path, fetched: Path, request: pytest.FixtureRequest) -> Project:
    """A project in the test's folder that has the quickstart's data already. No stand-ins in the long tests."""
    shutil.copytree(fetched, tmp_path / "data")
    return Project(tmp_path, whole=request.node.get_closest_marker("long") is not None)


@pytest.fixture(scope="session")
def database(shared: Path) -> Path:
    """An MLflow database that has its tables, to copy: making them takes seconds."""

    def prepare(folder: Path) -> None:
        command = tracking.prepare_command(f"sqlite:///{folder}/mlflow.db")
        subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)

    return made_once(shared / "database", prepare) / "mlflow.db"


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
