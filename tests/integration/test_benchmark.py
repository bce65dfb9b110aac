"""`doit benchmark`: here, and over two real SSH hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project

QUICK = ("benchmark", "experiment=quickstart", "pairs=1", "block_s=0.1")


def benchmark(project: Project) -> dict[str, Any]:
    (folder,) = project.folder.glob("runs/diagnostics/*-benchmark")
    value: dict[str, Any] = json.loads((folder / "benchmark.json").read_text())
    return value


@pytest.mark.long
def test_one_and_two_local_ranks_with_table_and_figures(project: Project) -> None:
    done = project.doit(*QUICK)
    assert done.returncode == 0, done.stdout
    assert "images/s over all ranks; the reference loop took turns" in done.stdout
    whole = benchmark(project)
    assert [(point["nnodes"], point["world_size"]) for point in whole["points"]] == [(1, 1), (1, 2)]
    assert [len(point["pairs"]) for point in whole["points"]] == [1, 1]
    assert whole["points"][1]["dataset"] == "digits"
    assert project.run_folders() == []


@pytest.mark.lab
@pytest.mark.long
def test_one_host_and_two(project: Project, lab: Lab) -> None:
    project.words = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'"]
    done = project.doit(*QUICK)
    assert done.returncode == 0, done.stdout
    whole = benchmark(project)
    assert [point["hosts"] for point in whole["points"]] == [["node0"], ["node0", "node1"]]
    assert [(point["nnodes"], point["world_size"]) for point in whole["points"]] == [(1, 1), (2, 2)]
