"""What the terminal gets of what a rank says."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.core.files import write_json
from pipeline.core.specs import LogLine
from pipeline.execution.attempting import _from_hosts, shown
from pipeline.runs import attempts
from tests.pipeline.test_launch_first_error import PLAN


def test_a_line_of_the_log_names_host_and_rank() -> None:
    assert shown(LogLine(host="node0", rank=3, text="epoch 1")) == "node0:3 | epoch 1"
    assert shown(LogLine(host="node0", rank=None, text="x" * 2000)) == f"node0:- | {'x' * 2000}"


def test_of_a_line_that_fills_pages_the_beginning_is_shown() -> None:
    said = shown(LogLine(host="node0", rank=3, text="é" * 65_536))
    assert said == f"node0:3 | {'é' * 2000}… (cut: 63,536 more characters are in the log)"


def test_nothing_is_said_of_a_beginning_while_hosts_may_have_a_scripts_checkpoints(tmp_path: Path) -> None:
    program = {"name": "script", "script": "train.py", "args": ["--resume", "{resume}"]}
    config = SimpleNamespace(resolved={"program": program})
    run: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), config=config)
    assert _from_hosts(run) == ""
    write_json(tmp_path / "plan.json", asdict(PLAN))
    attempts.register(tmp_path, PLAN.run_id)
    node = PLAN.nodes[0]
    assert _from_hosts(run) == f"from the newest checkpoint that attempt 1 has left on {node.host}, if there is one"
    here = replace(PLAN, nodes=(replace(node, run_dir=str(tmp_path)),))
    write_json(tmp_path / "plan.json", asdict(here))
    assert _from_hosts(run) == ""
