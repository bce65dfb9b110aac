"""A verb in the test's own process, as half of what a command costs is imports; and quick compositions."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.cli.commands import compare
from pipeline.cli.output import begin_answer
from pipeline.cli.session import Session, session
from pipeline.config import compose
from pipeline.keys import readings
from tests.pipeline.git_folders import nested as nested
from tests.pipeline.git_folders import repository as repository
from tests.quick_composition import quickly
from tests.quick_readings import shared_reading

Printed = Callable[..., str]
_COMPOSES = ("test_hydra_flags", "test_options", "test_origins", "test_own_defaults")


@pytest.fixture(scope="module", autouse=True)
def composing(request: pytest.FixtureRequest, shared: Path) -> Iterator[None]:
    """Compositions are made quickly, but where they are what is tested; no source is read twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "_parse", partial(shared_reading, shared / "readings"))
        if request.module.__name__.rpartition(".")[2] not in _COMPOSES:
            patch.setattr(compose, "compose", quickly)
        yield


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Printed]:
    """``printed(listing.runs, folder, "sort=key")``: what `doit runs sort=key` of a folder of runs prints, and then
    says on stderr; with json=1 the former alone, as a slow command says on stderr what it still does."""

    def call(verb: Callable[[Session], None], runs_dir: Path, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["doit", verb.__name__, f"paths.runs={runs_dir}", *words])
        session.cache_clear()
        begin_answer()
        verb(session())
        captured = capsys.readouterr()
        return captured.out if "json=1" in words else captured.out + captured.err

    yield call
    session.cache_clear()


@pytest.fixture
def reported(printed: Printed) -> Printed:
    """What `doit report` says."""
    return partial(printed, compare.report)


@pytest.fixture
def uri(tmp_path: Path, database: Path) -> str:
    """The address of a fresh MLflow database."""
    shutil.copy(database, tmp_path / "mlflow.db")
    return tracking.absolute_uri(None, tmp_path)
