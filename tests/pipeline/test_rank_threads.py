"""A run that goes on keeps the number of threads that it began with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.cluster.attempt import _with_threads
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.rank_threads import of_checkpoints, shortages
from pipeline.core.errors import UsageError
from tests.pipeline.test_launch_collect import seal
from tests.pipeline.test_plan import cluster, facts, rendered


def left_behind(folder: Path, *values: str, checkpoint: bool = True) -> Path:
    (folder / "checkpoints").mkdir()
    if checkpoint:
        (folder / "checkpoints" / "step-00000010.pt").touch()
    nodes = [{"env": {"OMP_NUM_THREADS": value}} for value in values]
    (folder / "plan.json").write_text(json.dumps({"nodes": nodes}))
    return folder


def test_the_attempt_that_left_a_checkpoint_decides_node_by_node(tmp_path: Path) -> None:
    assert of_checkpoints(left_behind(tmp_path, "4", "2")) == (4, 2)


def test_without_a_checkpoint_nothing_is_decided_yet(tmp_path: Path) -> None:
    assert of_checkpoints(left_behind(tmp_path, "4", checkpoint=False)) == ()


def test_a_plan_that_cannot_be_read_decides_nothing(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, "4,2")
    assert of_checkpoints(folder) == ()
    (folder / "plan.json").write_text("{")
    assert of_checkpoints(folder) == ()


def test_a_host_with_fewer_cores_than_before_is_named() -> None:
    plan = rendered(cluster(1, 1), facts(0), facts(1))  # eight threads a rank
    assert shortages(plan, [facts(0), facts(1)]) == []
    (said,) = shortages(plan, [facts(0), facts(1, cpus=2)])
    assert said.startswith("node1: 1 rank of 8 threads, as before, on 2 cores")


def test_a_damaged_plan_changes_no_thread_as_the_checkpoint_tells_its_own(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, "9", "9")
    seal(folder / "checkpoints" / "step-00000010.pt", nodes=[{"threads_per_rank": 4}, {"threads_per_rank": 2}])
    assert of_checkpoints(folder) == (4, 2)
    (folder / "plan.json").write_text("{")
    assert of_checkpoints(folder) == (4, 2)


def test_what_stands_beside_a_checkpoint_counts_only_unaltered(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, "9")
    seal(folder / "checkpoints" / "step-00000010.pt", nodes=[{"threads_per_rank": 4}])
    side = folder / "checkpoints" / "step-00000010.json"
    side.write_text(side.read_text().replace('"threads_per_rank": 4', '"threads_per_rank": 5'))
    assert of_checkpoints(folder) == (9,)


def test_with_shards_neither_cores_nor_checkpoints_decide_and_other_threads_are_refused(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, "4", "2")
    (folder / "config.json").write_text('{"trainer": {"shards": 8}}')
    spec = AttemptSpec(run_dir=folder, run_key="k", attempt=1, trainer="t", threads_per_rank=())
    assert _with_threads(spec, cluster(1, 1)).threads_per_rank == (1, 1)
    assert _with_threads(dataclasses.replace(spec, threads_per_rank=(1,)), cluster(1, 1)).threads_per_rank == (1, 1)
    with pytest.raises(UsageError, match=r"threads_per_rank=2: with trainer.shards=8 each rank has 1 thread on any"):
        _with_threads(dataclasses.replace(spec, threads_per_rank=(2,)), cluster(1, 1))
