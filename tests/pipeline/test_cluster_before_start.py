"""What is refused before a run exists: ranks that this computer can't have, hosts of a lab that isn't up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import lab
from pipeline.cluster import hosts
from pipeline.config.cluster import build_cluster
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster


def cluster(root: Path, *words: str, gpus: int = 0) -> Cluster:
    return build_cluster(resolve(compose_config(list(words)))["cluster"], root=root, local_gpus=gpus)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "count_cpus", lambda: 2)


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        (["cluster.device=cuda"], 0, "cluster.device=cuda: this computer has no GPU that CUDA may see\n  try: c"),
        (["cluster.device=cuda", "++cluster.env.CUDA_VISIBLE_DEVICES=-1"], 1, "no GPU that CUDA may see"),
    ],
)
def test_ranks_that_this_computer_cannot_have_are_refused(
    tmp_path: Path, words: list[str], gpus: int, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        hosts.check_cluster(cluster(tmp_path, *words, gpus=gpus), root=tmp_path, local_gpus=gpus)
    assert said in str(caught.value)


def test_more_than_two_ranks_on_a_core_are_warned_of(tmp_path: Path) -> None:
    four, five = (cluster(tmp_path, f"cluster.nproc_per_node={ranks}") for ranks in (4, 5))
    assert hosts.check_cluster(four, root=tmp_path, local_gpus=0) == ""
    warned = "WARNING: 5 ranks on 2 cores: they wait for each other; cluster.nproc_per_node=2 is faster"
    assert hosts.check_cluster(five, root=tmp_path, local_gpus=0) == warned


def test_a_lab_that_is_not_up_is_refused_at_once_with_the_command_that_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_lab = cluster(tmp_path, "cluster=two_node")
    with pytest.raises(UsageError, match=r"the lab of this project isn't up, and .*\n  try: doit lab --hosts 2; or"):
        hosts.check_cluster(of_lab, root=tmp_path, local_gpus=0)
    raised: Any = SimpleNamespace(running=True, hosts=(1, 2))
    monkeypatch.setattr(lab, "status", lambda _: raised)
    assert hosts.check_cluster(of_lab, root=tmp_path, local_gpus=0) == ""
    elsewhere = cluster(tmp_path, "cluster=two_node", f"cluster.ssh_config={tmp_path}/own")
    monkeypatch.setattr(lab, "status", lambda _: None)
    assert hosts.check_cluster(elsewhere, root=tmp_path, local_gpus=0) == ""
