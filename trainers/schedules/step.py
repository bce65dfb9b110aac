"""Step decay: the learning rate falls by a factor every ``step_epochs`` epochs."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.core.config import ScheduleConfig, at_least


@dataclass(kw_only=True)
class StepConfig(ScheduleConfig):
    """The learning rate falls by a factor after every so many epochs.

    Attributes:
        step_epochs: epochs from one fall to the next.
        gamma: the factor.
    """

    name: str = "step"
    step_epochs: int = 10
    gamma: float = 0.1

    def __post_init__(self) -> None:
        at_least("schedule.step_epochs", self.step_epochs, 1)


def rate(config: StepConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    return float(peak * config.gamma ** (step // steps_per_epoch // config.step_epochs))
