import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.trainers.tiny_runs import ROOT
from trainers.core.config import ModelConfig
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.distributed.resources import share, take_cores
from trainers.training.model_setup import fresh_network

NEEDS_TWO = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


@pytest.mark.parametrize(("count", "ranks", "size"), [(8, 2, 4), (8, 3, 2), (5, 5, 1), (64, 8, 8)])
def test_ranks_get_cores_of_their_own(count: int, ranks: int, size: int) -> None:
    parts = [share(list(range(count)), rank, ranks) for rank in range(ranks)]
    assert [len(part) for part in parts] == [size] * ranks
    assert len({core for part in parts for core in part}) == size * ranks


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (2, 3), (0, 2)])
def test_nothing_is_shared_out_to_one_rank_or_where_the_cores_are_too_few(count: int, ranks: int) -> None:
    assert share(list(range(count)), 0, ranks) == []


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever is bound in the test is set free again; as if torchrun had started this process."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    monkeypatch.setattr(os, "getppid", lambda: 0)  # 0 is this process itself: its parent may use what it may
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield monkeypatch
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@NEEDS_TWO
def test_two_ranks_of_a_node_are_bound_apart(as_before: pytest.MonkeyPatch) -> None:
    given, taken = os.sched_getaffinity(0), []
    for rank in range(2):
        os.sched_setaffinity(0, given)
        take_cores(Ranks(local_rank=rank, local_world_size=2))
        taken.append(os.sched_getaffinity(0))
        assert torch.get_num_threads() == len(given) // 2
    assert taken[0] | taken[1] <= given
    assert not taken[0] & taken[1]


@NEEDS_TWO
@pytest.mark.parametrize(("name", "value"), [("OMP_PROC_BIND", "true"), ("KMP_AFFINITY", "compact")])
def test_what_the_launcher_has_bound_stays(as_before: pytest.MonkeyPatch, name: str, value: str) -> None:
    given = os.sched_getaffinity(0)
    as_before.setenv(name, value)
    take_cores(Ranks(local_rank=1, local_world_size=2))
    assert os.sched_getaffinity(0) == given


def test_a_run_keeps_its_number_of_threads_where_there_are_fewer_cores(as_before: pytest.MonkeyPatch) -> None:
    more = len(os.sched_getaffinity(0)) + 3
    as_before.setenv("OMP_NUM_THREADS", str(more))
    take_cores(Ranks(local_rank=0, local_world_size=1))
    assert torch.get_num_threads() == more


@NEEDS_TWO
def test_more_threads_than_cores_are_not_squeezed_together(as_before: pytest.MonkeyPatch) -> None:
    given = os.sched_getaffinity(0)
    as_before.setenv("OMP_NUM_THREADS", str(len(given)))
    torch.set_num_threads(len(given))
    take_cores(Ranks(local_rank=0, local_world_size=2))
    assert os.sched_getaffinity(0) == given


def test_weights_are_made_by_one_thread_whatever_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr("trainers.models.build", lambda *_: seen.append(torch.get_num_threads()) or torch.nn.Flatten())
    torch.set_num_threads(2)
    manifest = cast(Any, SimpleNamespace(channels=1, height=8, width=8, num_classes=3))
    context = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    fresh_network(ModelConfig(name="x"), manifest, context, seed=0)
    seen.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert seen == [1, 2]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
def test_onednn_tells_which_instructions_it_takes_and_not_which_there_are() -> None:
    code = (
        "print('before'); from trainers.distributed.node_hardware import onednn_isa; "
        "print([onednn_isa(), onednn_isa()])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": "AVX"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "before\n['Intel AVX', 'Intel AVX']\n"
