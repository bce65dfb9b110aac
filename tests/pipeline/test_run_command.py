"""doit's command that runs tasks, as it is here."""

from __future__ import annotations

from typing import Any

import doit.plugin
import pytest
from doit.cmd_base import DodoTaskLoader
from doit.cmd_run import Run as RunOfDoit

from pipeline.cli.doit_plugins import Reporter, Run

ASKED: dict[str, Any] = {"bin_name": "doit", "config": {"REPORTER": {"paceline": "pipeline.cli.doit_plugins:Reporter"}}}


def test_databases_and_reporters_are_those_of_doit_and_pyproject_and_nothing_installed_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = RunOfDoit(task_loader=DodoTaskLoader(), **ASKED)
    monkeypatch.setattr(doit.plugin, "entry_points", None)
    found = Run(task_loader=DodoTaskLoader(), **ASKED)
    assert found.reporters == expected.reporters
    assert found.reporters["paceline"] is Reporter
    assert found.get_backends() == expected._backends
    for option in ("reporter", "backend"):
        assert found.cmdparser[option].choices == expected.cmdparser[option].choices
