"""Averages over two real ranks, as they are and in fp16 on the wire."""

from pathlib import Path

import torch
from torch import nn

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.config import DDPConfig
from trainers.distributed import connect
from trainers.gradients import GradientAverager


def average_on_this_rank(folder: Path) -> None:
    next_port()
    node = connect("gloo")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    for compression in ("none", "fp16"):
        model = nn.Linear(64, 5, bias=False)
        averager = GradientAverager(list(model.parameters()), 2, DDPConfig(compression=compression))
        for _ in range(2):  # the second step starts afresh
            averager.start(0)
            for part in range(3):
                if part == 2:
                    averager.send_next()
                (model(inputs[node.ranks.rank, part]).sum() / 6).backward()
            averager.finish()
        torch.save(model.weight.grad, folder / f"{compression}-{node.ranks.rank}.pt")
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
    for compression in ("none", "fp16"):
        assert found[f"{compression}-0"].equal(found[f"{compression}-1"])
