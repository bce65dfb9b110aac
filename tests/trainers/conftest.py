"""A run folder, ready to train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.tiny_runs import MakeRun, config, write_pack


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run folder; ``pack`` are arguments of write_pack."""

    def make(name: str = "run", *, pack: Mapping[str, Any] | None = None, **overrides: Any) -> Path:
        run_dir = tmp_path / name
        write_pack(run_dir / "data", **(pack or {}))
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        (run_dir / "config.json").write_text(json.dumps(config(dotted)))
        return run_dir

    return make


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a GPU: what computes on one is in test_gpu.py."""
    if not request.module.__name__.endswith("test_gpu"):
        monkeypatch.setenv("PACELINE_DEVICE", "cpu")
