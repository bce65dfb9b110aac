"""PowerSGD on two real ranks: what is sent in the end, alike on both, and a resumed run to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.test_gradients import WIDTH, Reused, average, same, strategy_of, warm_up
from tests.trainers.test_sharding import train
from tests.trainers.tiny_runs import MakeRun, read_summary
from trainers.distributed.connecting import connect
from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import spread
from trainers.entry import leave
from trainers.strategies import Strategy
from trainers.training.session import run

STEPS = 30


def strategy_on(context: RankContext, model: nn.Module, *, start_step: int) -> Strategy:
    return strategy_of(model, context, compression="powersgd", powersgd_rank=2, powersgd_start_step=start_step)


def average_on_this_rank(folder: Path) -> None:
    """The same gradients in every step: their mean over the steps is what should have arrived."""
    next_port()
    context = connect("gloo")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)[context.ranks.rank]
    model = nn.Linear(40, 30)
    strategy = strategy_on(context, model, start_step=1)
    warm_up(strategy, inputs[0])
    found = [average(strategy, inputs[:1], step) for step in range(STEPS + 1)]
    torch.save(found, folder / f"found-{context.ranks.rank}.pt")
    leave()  # in order, a thread of gloo that still holds the group would now and then abort the process


def test_error_feedback_sends_in_the_end_what_was_left_out(tmp_path: Path) -> None:
    torch.save(torch.randn(2, 2, 8, 40, generator=torch.Generator().manual_seed(1)), tmp_path / "inputs.pt")
    call_on_ranks("tests.trainers.test_powersgd:average_on_this_rank", tmp_path)
    found, other = (torch.load(tmp_path / f"found-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(a.equal(b) for step, again in zip(found, other, strict=True) for a, b in zip(step, again, strict=True))
    exact, steps = found[0], found[1:]  # the first step comes before the compression
    assert int(torch.linalg.matrix_rank(exact[0])) > 2 >= int(torch.linalg.matrix_rank(steps[0][0]))
    assert steps[0][1].equal(exact[1])  # a bias is sent as it is

    def miss(count: int) -> float:
        mean = torch.stack([step[0] for step in steps[:count]]).mean(0)
        return float((mean - exact[0]).norm() / exact[0].norm())

    assert miss(STEPS) < 0.2 < miss(1)


def meet_zeros_and_buckets(folder: Path) -> None:
    """A step of nothing but zeros, then a network of several buckets."""
    next_port()
    context = connect("gloo")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)[context.ranks.rank]
    strategy = strategy_on(context, nn.Linear(40, 30, bias=False), start_step=0)
    warm_up(strategy, inputs[0])
    for step in range(3):
        (gradient,) = average(strategy, inputs[:1] * 0.0, step)
        assert not gradient.any()
    found = [average(strategy, inputs[:1], step)[0] for step in range(3, 6)]
    assert all(item.isfinite().all() for item in found)
    assert found[-1].abs().max() > 0
    strategy = strategy_on(context, Reused("plain"), start_step=1)
    wide = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(context.ranks.rank))
    warm_up(strategy, wide[0])
    assert len(strategy.gradient_sync.own()) > 1
    several = [average(strategy, wide, step) for step in range(4)]
    torch.save(several, folder / f"several-{context.ranks.rank}.pt")
    leave()  # in order, a thread of gloo that still holds the group would now and then abort the process


def test_zeros_are_survived_and_several_buckets_are_alike_on_three_ranks(tmp_path: Path) -> None:
    torch.save(torch.randn(3, 1, 8, 40, generator=torch.Generator().manual_seed(1)), tmp_path / "inputs.pt")
    call_on_ranks("tests.trainers.test_powersgd:meet_zeros_and_buckets", tmp_path, nproc=3)
    found = [torch.load(tmp_path / f"several-{rank}.pt", weights_only=True) for rank in range(3)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_another_number_of_ranks_shares_what_was_not_sent(ranks: int) -> None:
    table = torch.tensor([[2.0, 1.0, -3.0], [4.0, 2.0, 5.0], [0.0, 0.5, 1.0], [2.0, 0.5, 1.0]])
    found = spread(table, ranks, 3)
    assert found[:, 0].tolist() == ([2.0] * ranks if ranks != 4 else [2.0, 4.0, 0.0, 2.0])
    assert found.mean(0).tolist() == [2.0, 1.0, 1.0]
    assert spread(table[:, :1], ranks, 3)[:, 1:].tolist() == [[0.0, 0.0]] * ranks
    assert spread(table, ranks, 1).shape == (ranks, 1)


def train_and_die(folder: Path) -> None:
    train(folder / "whole")
    for until in (2, 4, 11):  # before the compression, in its second step, and later
        train(folder / "killed", until=until)
    train(folder / "killed")
    train(folder / "plain")


@pytest.mark.ci
@pytest.mark.long
def test_a_run_learns_and_resumes_to_the_bit(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"trainer__epochs": 12, "trainer__checkpoint_every_steps": 2, "model__dropout": 0.0}
    settings["strategy"] = {"name": "ddp", "compression": "powersgd", "powersgd_start_step": 3}
    for name in ("whole", "killed"):
        make_run(name, **settings)
    make_run("plain", **{**settings, "strategy": {"name": "ddp"}})
    call_on_ranks("tests.trainers.test_powersgd:train_and_die", tmp_path, groups=6)
    whole, killed, plain = (read_summary(tmp_path / name) for name in ("whole", "killed", "plain"))
    assert killed["weights_sha256"] == whole["weights_sha256"] != plain["weights_sha256"]
    assert whole["metrics"]["test/accuracy"] > 0.9
    run(tmp_path / "whole" / "config.json")  # one rank, which has nobody to send to, takes up what two have written
    assert "was written by 2 ranks, now there are 1" in capsys.readouterr().out
    assert read_summary(tmp_path / "whole")["weights_sha256"] == whole["weights_sha256"]
