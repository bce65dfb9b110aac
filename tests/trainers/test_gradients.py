"""Averages over two real ranks: as they are, in fp16 on the wire, and through shared memory."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.distributed import connect
from trainers.gradients import GradientAverager
from trainers.shared_memory import SharedMemory, share_memory
from trainers.strategies.ddp import DDPConfig


def average_on_this_rank(folder: Path) -> None:
    next_port()
    node = connect("gloo")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    for way in ("none", "fp16", "shared"):
        model = nn.Linear(64, 5, bias=False)
        memory = share_memory(64 * 5, node) if way == "shared" else None
        assert (memory is not None) == (way == "shared")
        config = DDPConfig(compression="fp16" if way == "fp16" else "none")
        averager = GradientAverager(list(model.parameters()), 2, config, memory)
        for _ in range(2):  # the second step starts afresh
            averager.start(0)
            for part in range(3):
                if part == 2:
                    averager.send_next()
                (model(inputs[node.ranks.rank, part]).sum() / 6).backward()
            averager.finish()
        torch.save(model.weight.grad, folder / f"{way}-{node.ranks.rank}.pt")
    if memory is not None:
        leave(memory)
    node.close()


def leave(memory: SharedMemory) -> None:
    """Rank 1 goes without a word, as a killed process does."""
    if memory.rank == 1:
        memory.mouth.close()
        memory.ear.close()
        return
    with pytest.raises(ConnectionError, match="connection closed by peer"):
        memory.meet()


def ask_for_memory(_: Path) -> None:
    next_port()
    node = connect("gloo")
    assert share_memory(10, node) is None
    node.sum(torch.zeros(1))  # none leaves before all have come
    node.close()


def test_gradients_are_the_mean_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    inputs = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(1))
    torch.save(inputs, tmp_path / "inputs.pt")
    call_on_ranks("tests.trainers.test_gradients:average_on_this_rank", tmp_path)
    found = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*-?.pt")}
    wanted = (inputs.sum((0, 1, 2)) / 6).expand(5, 64)
    torch.testing.assert_close(found["none-0"], wanted)
    torch.testing.assert_close(found["fp16-0"], wanted, rtol=0, atol=2e-3)
    assert not found["fp16-0"].equal(found["none-0"])
    for way in ("none", "fp16", "shared"):
        assert found[f"{way}-0"].equal(found[f"{way}-1"])


def test_shared_memory_gives_the_bits_that_gloo_gives(tmp_path: Path) -> None:
    torch.save(torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(2)), tmp_path / "inputs.pt")
    call_on_ranks("tests.trainers.test_gradients:average_on_this_rank", tmp_path)
    shared, gloo = (torch.load(tmp_path / f"{way}-0.pt", weights_only=True) for way in ("shared", "none"))
    assert shared.equal(gloo)


def test_ranks_on_two_hosts_share_no_memory(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_gradients:ask_for_memory", tmp_path, nnodes=2, nproc=1)
