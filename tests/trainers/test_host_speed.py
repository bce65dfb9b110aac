"""The node module behind `doit preflight measure=1`, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.measuring.speeds import run


def measure_on_this_rank(folder: Path) -> None:
    next_port()
    run("gloo", folder / "out.json", side=32, size_bytes=4096)


@pytest.mark.ci
@pytest.mark.long
def test_each_rank_each_node_and_each_pair_are_measured(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_host_speed:measure_on_this_rank", tmp_path, nnodes=2, nproc=2)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(rank["rank"], rank["node_rank"]) for rank in result["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert min(rank["flop_per_s"] for rank in result["ranks"]) > 0
    groups = [(group["nodes"], group["ranks"], group["wrong_elements"]) for group in result["groups"]]
    assert groups == [([0], 2, 0), ([1], 2, 0), ([0, 1], 4, 0)]
    assert min(group["bus_bytes_per_s"] for group in result["groups"]) > 0


@pytest.mark.ci
@pytest.mark.long
def test_one_rank_alone_is_measured_without_anybody_to_add_up_with(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_host_speed:measure_on_this_rank", tmp_path, nproc=1)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (len(result["ranks"]), result["groups"]) == (1, [])
