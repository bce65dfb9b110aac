"""A project of the test's own with steps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.steps.graph import Graph
from pipeline.steps.making import make_all


@dataclass
class StepProject:
    """``said`` is what was told while steps were made."""

    root: Path
    said: list[str] = field(default_factory=list)

    def step(self, name: str, text: str) -> None:
        """conf/step/NAME.yaml."""
        self.write(f"conf/step/{name}.yaml", text)

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def graph(self, **composed: Any) -> Graph:
        base: Mapping[str, Any] = {"seed": 0, "optimizer": {"lr": 0.1}}
        return Graph({**base, **composed}, root=self.root, runs_dir=self.root / "runs")

    def make(self, *names: str, at_once: int = 1, **composed: Any) -> int:
        return make_all(self.graph(**composed), names, self.said.append, at_once=at_once)

    def out(self, name: str, **composed: Any) -> Path:
        made = self.graph(**composed).status(name).made
        assert made is not None
        return made.out

    def why(self, name: str, **composed: Any) -> tuple[str, ...]:
        return self.graph(**composed).status(name).reasons

    @property
    def left(self) -> list[str]:
        """What lies below runs/steps besides locks and notes."""
        found = (path.name for path in (self.root / "runs/steps").glob("*"))
        return sorted(name for name in found if not name.endswith((".lock", ".fingerprints.json")))


@pytest.fixture
def project(tmp_path: Path) -> StepProject:
    return StepProject(tmp_path)
