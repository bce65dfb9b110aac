"""Two torchruns, as the plan renders them for two nodes, that meet in a file and train the same weights.

The static rendezvous is the one of all other tests with two hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.plan import render
from pipeline.core.specs import Cluster, Host, LaunchPlan, NodeFacts
from tests.trainers.ranks import call_on_ranks, free_ports
from tests.trainers.tiny_runs import ROOT, MakeRun, read_summary
from tests.waiting import HANG_S

pytest_plugins = ["tests.trainers.conftest"]


def plan_for(cluster: Cluster) -> LaunchPlan:
    facts = [
        NodeFacts(
            host=host.name,
            identity=host.name,
            hostname=host.name,
            address="127.0.0.1",
            interface=None,
            python=sys.executable,
            python_version="3.11",
            torch_version="2",
            gpus=0,
            cpus=1,
            memory_bytes=1,
            disk_free_bytes=1,
            free_port=0,
            home="/",
            unix_time=0.0,
        )
        for host in cluster.hosts
    ]
    return render(
        cluster,
        facts,
        AttemptSpec(run_dir=Path("/runs/abc"), run_key="abc", attempt=1, trainer="trainers.classifier"),
        run_id="abc-1-ff",
        master_port=free_ports(1)[0],
    )


def train(plan: LaunchPlan) -> None:
    """Node 1 starts first: each torchrun is alone, and knows nothing of its rank."""
    nodes = [
        subprocess.Popen(
            node.argv,
            env={**os.environ, **node.env, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in reversed(plan.nodes)
    ]
    try:
        outputs = [node.communicate(timeout=HANG_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], outputs


@pytest.mark.long
def test_in_a_file_the_first_node_gets_rank_0_too_and_the_weights_are_the_same(
    make_run: MakeRun, tmp_path: Path
) -> None:
    hosts = (Host(name="0"), Host(name="1"))
    plain = make_run("plain", trainer__epochs=1)
    call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", plain, nnodes=2, nproc=1)
    meet = tmp_path / "meet"
    cluster = Cluster(launcher="pssh", hosts=hosts, rendezvous="file", rendezvous_dir=str(meet), workdir=str(tmp_path))
    folders = [make_run(f"file {number}", trainer__epochs=1) for number in range(2)]
    for folder in folders:
        (folder / "code").symlink_to(ROOT)
    plan = plan_for(cluster)
    for node, folder in zip(plan.nodes, folders, strict=True):
        Path(node.run_dir).parent.mkdir(parents=True, exist_ok=True)
        Path(node.run_dir).symlink_to(folder)
    train(plan)
    summary = read_summary(folders[0])
    assert (summary["nnodes"], summary["world_size"]) == (2, 2)
    assert not (folders[1] / "summary.json").exists()
    assert summary["weights_sha256"] == read_summary(plain)["weights_sha256"]
    assert list(meet.iterdir()) == []
