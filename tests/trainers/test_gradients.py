"""What DistributedDataParallel makes of a step's gradients on real ranks, as the training uses it."""

import functools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.tiny_runs import config
from trainers.core.errors import TrainerError
from trainers.core.options import parse
from trainers.distributed.process_group import RankContext, connect
from trainers.strategies import Strategy, build
from trainers.strategies.sums import SharedSum, share_memory, shared_memory_hook

STEPS, PARTS, WIDTH = 4, 3, 520  # a layer of that width fills a bucket


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


def strategy_of(model: nn.Module, context: RankContext, **strategy: Any) -> Strategy:
    settings = parse(config({"strategy": {"name": "ddp", **strategy}}))
    return build(settings, model, context, "fp32")


def average(strategy: Strategy, inputs: Tensor) -> list[Tensor]:
    """The gradients of a step. inputs: [micro-batches, images, values]."""
    sync = strategy.gradient_sync
    sync.start()
    for number, part in enumerate(inputs):
        with sync.micro_batch(last=number == len(inputs) - 1):
            (strategy.network(part).square().sum() / len(inputs)).backward()
    sync.finish()
    return [item.grad.clone() for item in strategy.layout.parameters if item.grad is not None]


def warm_up(strategy: Strategy, part: Tensor) -> None:
    for _ in range(strategy.gradient_sync.warm_up_passes):
        average(strategy, part.unsqueeze(0))


def expected(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Their mean over ranks and micro-batches. inputs: [ranks, micro-batches, images, values]."""
    model.zero_grad()
    for part in inputs.flatten(0, 1):
        (model(part).square().sum() / inputs[:, :, 0].numel() * inputs.shape[-1]).backward()
    return [item.grad.clone() for item in model.parameters() if item.grad is not None]


def inputs_of(folder: Path) -> Tensor:
    """[steps, ranks, micro-batches, images, values]"""
    found: Tensor = torch.load(folder / "inputs.pt", weights_only=True)
    return found


def average_on_this_rank(folder: Path) -> None:
    """Every way in which gradients travel, on a network of three buckets."""
    next_port()
    context, inputs = connect("gloo"), inputs_of(folder)
    rank = context.ranks.rank
    for way, settings in {"none": {}, "fp16": {"compression": "fp16"}}.items():
        torch.manual_seed(3)
        strategy = strategy_of(Reused("plain"), context, **settings)
        warm_up(strategy, inputs[0, rank, 0])
        found = [average(strategy, inputs[step, rank]) for step in range(STEPS)]
        torch.save(found, folder / f"{way}-{rank}.pt")
    context.close()


def write_inputs(folder: Path, ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(STEPS, ranks, PARTS, 5, WIDTH, generator=generator).requires_grad_()
    torch.save(inputs, folder / "inputs.pt")
    return inputs


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_are_the_mean_over_ranks_and_micro_batches(tmp_path: Path, ranks: int) -> None:
    inputs = write_inputs(tmp_path, ranks)
    call_on_ranks("tests.trainers.test_gradients:average_on_this_rank", tmp_path, nproc=ranks)
    found = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*-?.pt")}
    torch.manual_seed(3)
    model = Reused("plain")
    for step in range(STEPS):
        wanted = expected(model, inputs[step])
        torch.testing.assert_close(found["none-0"][step], wanted)
        torch.testing.assert_close(found["fp16-0"][step], wanted, rtol=1e-2, atol=1e-2)
    for way in ("none", "fp16"):
        for rank in range(1, ranks):
            assert same(found[f"{way}-0"], found[f"{way}-{rank}"])
    assert not same(found["fp16-0"], found["none-0"])


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(a.equal(b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_shared_memory_gives_the_bits_that_gloo_gives(tmp_path: Path) -> None:
    for name, nnodes in (("shared", 1), ("gloo", 2)):
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, 2)
        target = "tests.trainers.test_gradients:average_on_this_rank"
        call_on_ranks(target, tmp_path / name, nnodes=nnodes, nproc=2 // nnodes)
    shared, gloo = (torch.load(tmp_path / name / "none-0.pt", weights_only=True) for name in ("shared", "gloo"))
    assert same(shared, gloo)


def lose_the_other_rank(_: Path) -> None:
    """Rank 1 goes without a word, as a killed process does."""
    next_port()
    context = connect("gloo")
    memory = share_memory(WIDTH, context)
    assert memory is not None
    network = DistributedDataParallel(nn.Linear(WIDTH, 1, bias=False), static_graph=True)
    network.register_comm_hook(SharedSum(memory=memory), shared_memory_hook)
    if memory.rank == 1:
        memory.outgoing.close()
        memory.incoming.close()
    else:
        with pytest.raises(ConnectionError, match="connection closed by peer: the other rank of this host has ended"):
            network(torch.ones(1, WIDTH)).sum().backward()
    context.close()


def test_a_rank_that_ends_is_noticed_in_the_shared_memory(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_gradients:lose_the_other_rank", tmp_path)


def ask_for_memory(_: Path) -> None:
    next_port()
    context = connect("gloo")
    assert share_memory(10, context) is None
    context.sum(torch.zeros(1))  # none leaves before all have come
    context.close()


def test_ranks_on_two_hosts_share_no_memory(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_gradients:ask_for_memory", tmp_path, nnodes=2, nproc=1)


def reuse_on_this_rank(folder: Path) -> None:
    """A layer that is used twice, with reentrant checkpointing, and compiled."""
    next_port()
    context, inputs = connect("gloo"), inputs_of(folder)
    rank = context.ranks.rank
    compile_eagerly = functools.partial(torch.compile, backend="eager")
    for way in ("plain", "checkpointed", "compiled"):
        torch.manual_seed(3)
        model, reference = Reused(way), Reused("plain")
        reference.load_state_dict(model.state_dict())
        settings = parse(config({"trainer.compile": way == "compiled"}))
        with patch.object(torch, "compile", lambda model, *, dynamic, mode: compile_eagerly(model, dynamic=dynamic)):
            strategy = build(settings, model, context, "fp32")
        warm_up(strategy, inputs[0, rank, 0])
        for step in range(STEPS):
            torch.testing.assert_close(average(strategy, inputs[step, rank]), expected(reference, inputs[step]))
    context.close()


@pytest.mark.ci
@pytest.mark.long
def test_layers_used_twice_checkpointed_or_compiled_get_the_gradients_of_a_plain_backward_pass(tmp_path: Path) -> None:
    write_inputs(tmp_path, 2)
    call_on_ranks("tests.trainers.test_gradients:reuse_on_this_rank", tmp_path)


def change_the_network(folder: Path) -> None:
    """Each kind of change, on a network of its own."""
    next_port()
    context, inputs = connect("gloo"), inputs_of(folder)
    part = inputs[0, context.ranks.rank]
    model = Reused("unused")
    strategy = strategy_of(model, context)
    with pytest.raises(TrainerError, match=r"unused.weight took no part in the loss \(nor did 1 more\); use it in"):
        warm_up(strategy, part[0])
    context.sum(torch.zeros(1))

    model = Reused("checkpointed")
    strategy = strategy_of(model, context)
    warm_up(strategy, part[0])
    again = model._again
    changed = pytest.raises(TrainerError, match=r"same layers in every step.*Your training graph has changed")
    with patch.object(model, "_again", lambda values: again(again(values))), changed:
        average(strategy, part)
    context.sum(torch.zeros(1))

    model = Reused("checkpointed")
    strategy = strategy_of(model, context)
    warm_up(strategy, part[0])
    with patch.object(model, "_again", lambda values: values), pytest.raises(TrainerError, match=r"shared.weight took"):
        average(strategy, part)
    with pytest.raises(TrainerError, match=r"same layers in every step.*Expected to have finished reduction"):
        average(strategy, part)
    context.sum(torch.zeros(1))

    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(TrainerError, match=r"has no parameter that is to be trained; torch says: Dist"):
        strategy_of(frozen, context)
    other = nn.Linear(2, 3 + context.ranks.rank)
    differs = (
        r"the same parameters on every rank; torch says: .*appears not to match sizes" if context.ranks.rank else None
    )
    with pytest.raises(TrainerError if context.ranks.rank else RuntimeError, match=differs):
        strategy_of(other, context)
    context.close()


def test_a_network_that_uses_other_layers_than_in_its_first_pass_is_one_clear_error(tmp_path: Path) -> None:
    write_inputs(tmp_path, 2)
    call_on_ranks("tests.trainers.test_gradients:change_the_network", tmp_path)
