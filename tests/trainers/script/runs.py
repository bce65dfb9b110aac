"""A run folder of a script, started as an agent starts it, with a plain interpreter in torchrun's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ScriptRun:
    """``project`` is a checkout with the script, ``path`` its run folder, ``data`` what {data} stands for."""

    project: Path
    path: Path
    data: str = ""
    script: str = "train.py"
    prefix: tuple[str, ...] = ()  # of the command that starts it

    def write(self, script: str, /, files: Mapping[str, str] | None = None, **program: Any) -> ScriptRun:
        """The snapshot (the script and ``files``) and config.json."""
        for name, text in {self.script: script, **(files or {})}.items():
            for folder in (self.project, self.path / "code"):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        config = {"seed": 7, "program": {"name": "script", "script": self.script, **program}, "paths": {"runs": "runs"}}
        (self.path / "config.json").write_text(json.dumps(config))
        return self

    def begin(self, *torchrun: str, env: Mapping[str, str] | None = None, node_rank: int = 0) -> subprocess.Popen[str]:
        """Start it and go on."""
        return subprocess.Popen(
            self.words(torchrun or (sys.executable,), node_rank),
            cwd=self.path,
            env={**_inherited(), "PYTHONPATH": str(ROOT), "PACELINE_NODE": "k-1:0", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def words(self, torchrun: Sequence[str], node_rank: int) -> list[str]:
        """The command line."""
        own = ["--config", str(self.path / "config.json"), "--script", self.script, "--node-rank", str(node_rank)]
        return [*self.prefix, sys.executable, "-m", "trainers.script.start", *own, "--data", self.data, "--", *torchrun]

    def start(self, *torchrun: str, code: int = 0, **options: Any) -> str:
        """Run it to its end, which has to have that exit code. Returns what it printed."""
        process = self.begin(*torchrun, **options)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == code, said
        return said

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics) of metrics.jsonl."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["metrics"]) for row in map(json.loads, lines)]

    def read(self, name: str) -> Any:
        """A JSON file of the run folder."""
        return json.loads((self.path / name).read_text())


def _inherited() -> dict[str, str]:
    """What no test before this one has set: mlflow.set_tracking_uri writes into the environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
