import pytest
import torch

from trainers.core.errors import TrainerError
from trainers.distributed.process_group import choose_device, usable_gpus
from trainers.distributed.ranks import Ranks, read_ranks


def test_a_process_without_torchrun_is_the_only_rank() -> None:
    assert read_ranks({}) == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, nnodes=1)


def test_the_place_of_a_rank_is_what_torchrun_says() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    assert read_ranks(environment) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2, nnodes=2)


@pytest.mark.parametrize(
    ("backend", "gpus", "wanted"),
    [
        ("auto", 0, ("cpu", "gloo")),
        ("auto", 4, ("cuda:1", "nccl")),
        ("nccl", 2, ("cuda:1", "nccl")),
        ("gloo", 1, ("cuda:0", "gloo")),  # two ranks may share a GPU over gloo
    ],
)
def test_device_and_backend_follow_from_the_gpus(backend: str, gpus: int, wanted: tuple[str, str]) -> None:
    device, chosen = choose_device(backend, Ranks(local_rank=1, local_world_size=2), gpus=gpus, host="node0")
    assert (str(device), chosen) == wanted


def test_more_ranks_than_gpus_are_refused_for_nccl() -> None:
    with pytest.raises(TrainerError, match=r"nproc 4 > 2 GPUs on host node0.* set cluster.nproc_per_node=2"):
        choose_device("auto", Ranks(local_world_size=4), gpus=2, host="node0")


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(TrainerError, match="backend=nccl, but host node0 has no GPU"):
        choose_device("nccl", Ranks(), gpus=0, host="node0")


@pytest.mark.parametrize(("kind", "count"), [(None, 2), ("cuda", 2), ("cpu", 0)])
def test_a_rank_leaves_gpus_alone_that_the_key_does_not_name(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert usable_gpus(kind, "node0") == count


def test_a_rank_without_the_gpu_that_the_key_names_does_not_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainerError, match=r"key says cuda, but torch .* on host node0 sees no GPU.*device=cpu"):
        usable_gpus("cuda", "node0")
