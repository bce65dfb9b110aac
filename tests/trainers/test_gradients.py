"""Averages over two real ranks: as they are, in fp16 on the wire, through shared memory; against torch's own."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import connect
from trainers.strategies.ddp import DDPConfig
from trainers.strategies.gradients import GradientAverager
from trainers.strategies.shared_memory import SharedMemory, share_memory


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


WIDTH = 520  # a layer's weights fill a bucket


class Reused(nn.Module):
    """One layer twice in a forward pass, with reentrant checkpointing: its gradient comes in two parts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.unused = nn.Linear(2, 2)
        self.unused.requires_grad_(way == "unused")

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for _ in range(2):
            values = self._again(values)
        return self.last(values)

    def _again(self, values: Tensor) -> Tensor:
        if self.way != "checkpointed":
            return torch.tanh(self.shared(values))
        result: Tensor = checkpoint(lambda given: torch.tanh(self.shared(given)), values, use_reentrant=True)
        return result


def reuse_on_this_rank(folder: Path) -> None:
    next_port()
    node = connect("gloo")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)[node.ranks.rank]
    for way in ("plain", "checkpointed"):
        for parts in (1, 2):
            gradients = [torch.cat(run) for run in (ours(way, inputs, parts), theirs(way, inputs, parts))]
            torch.testing.assert_close(*gradients)
    model = Reused("unused")
    averager = averager_of(model)
    averager.start(0)
    averager.send_next()
    model(inputs[0]).sum().backward()
    with pytest.raises(TrainerError, match=r"unused.weight took no part in the loss \(nor did 1 more\); use it in"):
        averager.finish()
    node.sum(torch.zeros(1))  # none leaves before all have come
    node.close()


def averager_of(model: nn.Module) -> GradientAverager:
    named = {name: item for name, item in model.named_parameters() if item.requires_grad}
    return GradientAverager(list(named.values()), 2, DDPConfig(), names=list(named))


def ours(way: str, inputs: Tensor, parts: int) -> list[Tensor]:
    torch.manual_seed(3)
    model, found = Reused(way), []
    averager = averager_of(model)
    for step in range(3):
        averager.start(step)
        for part in range(parts):
            if part == parts - 1:
                averager.send_next()
            (model(inputs[step, part]).square().sum() / (2 * parts)).backward()
        averager.finish()
        found += [item.grad.flatten().clone() for item in model.parameters() if item.grad is not None]
    return found


def theirs(way: str, inputs: Tensor, parts: int) -> list[Tensor]:
    torch.manual_seed(3)
    model, found = Reused(way), []
    wrapped = DistributedDataParallel(model, static_graph=True)
    for step in range(3):
        wrapped.zero_grad()
        # one backward pass of the sum: with no_sync and a static graph torch itself would lose the first part
        sum(wrapped(inputs[step, part]).square().sum() / parts for part in range(parts)).backward()
        found += [item.grad.flatten().clone() for item in model.parameters() if item.grad is not None]
    return found


def test_a_layer_that_is_used_twice_gets_the_gradients_that_torch_gives_it(tmp_path: Path) -> None:
    torch.save(
        torch.randn(2, 3, 2, 5, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_(),
        tmp_path / "inputs.pt",
    )
    call_on_ranks("tests.trainers.test_gradients:reuse_on_this_rank", tmp_path)


def test_a_gradient_in_more_parts_than_in_the_first_step_names_its_parameter() -> None:
    model = Reused("plain")
    averager = averager_of(model)
    averager._expected = [1] * 6
    averager.start(1)
    averager.send_next()
    for bucket in averager._buckets:
        bucket.waiting = 99  # nothing is sent: there is no other rank
    model(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(TrainerError, match=r"the gradient of last.bias came in more than the 1 part\(s\) of the first"):
        model.last(torch.ones(1, WIDTH)).sum().backward()
