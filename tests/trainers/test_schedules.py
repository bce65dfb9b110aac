"""The learning rate of each step, first and last of short runs above all."""

import warnings
from itertools import product

import pytest
import torch

from trainers.core.config import ScheduleConfig
from trainers.schedules import lr_at
from trainers.schedules.cosine import CosineConfig
from trainers.schedules.one_cycle import OneCycleConfig
from trainers.schedules.step import StepConfig
from trainers.schedules.triangle import TriangleConfig

SHORT = range(1, 31)  # steps of a run
ROUNDING = 1e-12
WARMUPS = (0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.99)


def rates(config: ScheduleConfig, total: int, *, peak: float = 1.0, steps_per_epoch: int = 2) -> list[float]:
    return [lr_at(config, peak, step, total_steps=total, steps_per_epoch=steps_per_epoch) for step in range(total)]


def torchs_one_cycle(config: OneCycleConfig, total: int, peak: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was stepped
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=total, pct_start=config.warmup)
        found = [float(schedule.get_last_lr()[0])]
        for _ in range(total - 1):
            schedule.step()
            found += map(float, schedule.get_last_lr())
    return found


@pytest.mark.parametrize("warmup", WARMUPS)
def test_one_cycle_is_that_of_torch_for_runs_of_any_length(warmup: float) -> None:
    config = OneCycleConfig(warmup=warmup)
    for total in (*SHORT[1:], 200):
        if warmup * total == 1:  # the peak is step 0: torch divides by 0
            continue
        assert rates(config, total, peak=0.4) == pytest.approx(torchs_one_cycle(config, total, 0.4)), total


@pytest.mark.parametrize("warmup", WARMUPS)
def test_one_cycle_begins_and_ends_as_documented(warmup: float) -> None:
    config = OneCycleConfig(warmup=warmup, div_factor=25.0, final_div_factor=1e4)
    assert rates(config, 1) == [1.0]
    for total in SHORT[1:]:
        found = rates(config, total)
        assert found[-1] == pytest.approx(1 / 25 / 1e4), total
        if warmup * total > 1:
            assert found[0] == pytest.approx(1 / 25), total
        else:  # the way up is shorter than a step
            assert found[0] > found[1], total
        assert max(found) <= 1 + ROUNDING


@pytest.mark.parametrize(("warmup", "end"), list(product((0.0, *WARMUPS), (0.0, 0.1))))
def test_triangle_begins_and_ends_as_documented(warmup: float, end: float) -> None:
    for total in SHORT:
        found = rates(TriangleConfig(warmup=warmup, start=0.2, end=end), total)
        up, down = warmup * total, total - warmup * total
        assert found[0] == pytest.approx(0.2 + 0.8 / (up + 1)), total
        assert found[-1] == pytest.approx(end + (1 - end) / down if down >= 1 else max(found)), total
        assert all(0 < rate <= 1 + ROUNDING for rate in found), total


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (TriangleConfig(warmup=0.5, start=0.0, end=0.0), [1 / 3, 2 / 3, 1.0, 0.5]),
        (TriangleConfig(warmup=0.0), [1.0, 0.75, 0.5, 0.25]),
        (TriangleConfig(warmup=0.0, end=0.2), [1.0, 0.8, 0.6, 0.4]),
    ],
)
def test_triangle_goes_up_and_down_in_straight_lines(config: TriangleConfig, shares: list[float]) -> None:
    assert rates(config, 4, peak=2.0) == pytest.approx([2 * share for share in shares])


@pytest.mark.parametrize(("step_epochs", "steps_per_epoch"), list(product((1, 2, 3), (1, 2, 3))))
def test_step_schedule_begins_at_the_peak_and_falls_after_every_so_many_epochs(
    step_epochs: int, steps_per_epoch: int
) -> None:
    for total in SHORT:
        found = rates(StepConfig(step_epochs=step_epochs, gamma=0.1), total, steps_per_epoch=steps_per_epoch)
        falls = [step for step in range(1, total) if found[step] != found[step - 1]]
        assert found[0] == 1.0
        assert falls == list(range(step_epochs * steps_per_epoch, total, step_epochs * steps_per_epoch))
        assert found[-1] == pytest.approx(0.1 ** len(falls))


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
def test_cosine_is_torchs_linear_warm_up_and_cosine_annealing(warmup: float) -> None:
    config, total = CosineConfig(warmup=warmup, start=0.2, end=0.1), 20
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    turn = round(warmup * total)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - turn, eta_min=0.04)
    schedule: torch.optim.lr_scheduler.LRScheduler = down
    if turn:
        up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=turn)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], [turn])
    wanted = []
    for _ in range(total):
        wanted.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    assert rates(config, total, peak=0.4) == pytest.approx(wanted)


def test_cosine_has_a_rate_above_0_in_every_step_of_short_runs() -> None:
    for total, warmup in product(SHORT, (0.0, *WARMUPS)):
        found = rates(CosineConfig(warmup=warmup), total)
        assert min(found) > 0
        assert max(found) <= 1 + ROUNDING
