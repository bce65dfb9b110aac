"""Linear warm-up, then a half-cosine decay (Loshchilov, Hutter: SGDR, 2017, without restarts)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.core.config import ConfigError, ScheduleConfig, below_one


@dataclass(kw_only=True)
class CosineConfig(ScheduleConfig):
    """In a straight line from ``start`` × lr up to lr, then in a half cosine down to ``end`` × lr.

    As torch's LinearLR and then CosineAnnealingLR. The lowest rate would be that of the step after the last one.

    Attributes:
        warmup: share of all steps on the way up, from 0 (down from the first step) to below 1.
        start: share of lr at which the way up begins.
        end: share of lr at which the way down ends.
    """

    name: str = "cosine"
    warmup: float = 0.05
    start: float = 0.01
    end: float = 0.0

    def __post_init__(self) -> None:
        below_one("schedule.warmup", self.warmup)
        if not 0 < self.start <= 1:
            raise ConfigError(f"schedule.start={self.start} must lie in (0, 1]")
        if not 0 <= self.end <= 1:
            raise ConfigError(f"schedule.end={self.end} must lie in [0, 1]")


def rate(config: CosineConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """Return the rate of a step (see trainers.schedules). The warm-up is rounded to whole steps."""
    peak_step = round(config.warmup * total_steps)
    if step < peak_step:
        return peak * (config.start + (1 - config.start) * step / peak_step)
    share = (step - peak_step) / max(1, total_steps - peak_step)
    return peak * (config.end + (1 - config.end) * (1 + math.cos(math.pi * share)) / 2)
