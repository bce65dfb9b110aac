"""What several folders of tests begin with: made by the first worker that asks for it, copied by the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.core.locks import held
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """A folder that all workers of this call of pytest share."""
    return shared_folder()


def shared_folder() -> Path:
    """The same where no fixture is; once ``temporary_files`` (tests/conftest.py) has said where."""
    own = Path(tempfile.gettempdir()).parent
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """``folder`` with what ``make`` puts there, by the first worker that asks for it."""
    made = Path(f"{folder}.made")
    with held(Path(f"{folder}.lock")):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker whose attempt failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def database(shared: Path) -> Path:
    """An MLflow database that has its tables, to copy: making them takes seconds."""

    def prepare(folder: Path) -> None:
        command = tracking.prepare_command(f"sqlite:///{folder}/mlflow.db")
        subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)

    return made_once(shared / "database", prepare) / "mlflow.db"
