"""Learning-rate schedules: functions from a step to its rate. Each module here has a schedule's settings and
``rate``."""

from __future__ import annotations

from trainers.core import options
from trainers.core.config import ScheduleConfig


def lr_at(config: ScheduleConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of step ``step`` (from 0), given the peak. There is no state. Raises ConfigError."""
    rate = options.module("schedule", config.name).rate
    return float(rate(config, peak, step, total_steps=total_steps, steps_per_epoch=steps_per_epoch))
