"""A verb in the test's own process: half of what a command costs is imports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli.session import session

Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Printed]:
    """``printed(listing.runs, folder, "sort=key")``: what `doit runs sort=key` of a folder of runs prints."""

    def call(verb: Callable[[], None], runs_dir: Path, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["doit", verb.__name__, f"paths.runs={runs_dir}", *words])
        session.cache_clear()
        verb()
        return capsys.readouterr().out

    yield call
    session.cache_clear()
