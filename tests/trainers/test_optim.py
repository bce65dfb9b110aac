import math

import pytest
import torch
from torch import nn

from trainers.config import AdamConfig, OneCycleScheduleConfig, ScheduleConfig, SGDConfig, StepScheduleConfig
from trainers.optim import build, lr_at, peak_lr

SGD = SGDConfig(lr=0.1, weight_decay=0.01)
ADAM = AdamConfig(lr=0.01, weight_decay=0.01)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        (SGDConfig(momentum=0.0, nesterov=False), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ADAM, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01)),
    ],
)
def test_optimizers_do_what_those_of_torch_do(config, make) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer, reference = build(config, [ours]), make([theirs])
    for _ in range(5):
        for parameter in (ours, theirs):
            parameter.grad = None
            (parameter**3).sum().backward()
        optimizer.step(config.lr)
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_a_parameter_without_gradient_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 parameters got no gradient"):
        build(SGD, [nn.Parameter(torch.zeros(1))]).step(0.1)


def test_one_cycle_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(reference, 0.4, total_steps=20, pct_start=0.25)
    wanted = []
    for _ in range(20):
        wanted.append(schedule.get_last_lr()[0])
        reference.step()
        schedule.step() if len(wanted) < 20 else None
    config = OneCycleScheduleConfig(warmup=0.25)
    ours = [lr_at(config, 0.4, step, total_steps=20, steps_per_epoch=5) for step in range(20)]
    assert ours == pytest.approx(wanted)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_has_a_rate_for_the_shortest_runs(total: int) -> None:
    for step in range(total):
        assert 0 < lr_at(OneCycleScheduleConfig(), 0.4, step, total_steps=total, steps_per_epoch=1) <= 0.4


def test_step_schedule_falls_after_every_so_many_epochs() -> None:
    config = StepScheduleConfig(step_epochs=2, gamma=0.1)
    rates = [lr_at(config, 1.0, step, total_steps=15, steps_per_epoch=3) for step in (0, 5, 6, 11, 12)]
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])


def test_constant_schedule_never_falls() -> None:
    assert lr_at(ScheduleConfig(), 0.3, 999, total_steps=1000, steps_per_epoch=10) == 0.3


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_world_size_as_named(scaling: str, factor: float) -> None:
    assert math.isclose(peak_lr(SGDConfig(lr=0.1, lr_scaling=scaling), 4), 0.1 * factor)
