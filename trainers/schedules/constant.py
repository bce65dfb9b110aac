"""Constant learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.core.config import ScheduleConfig


@dataclass(kw_only=True)
class ConstantConfig(ScheduleConfig):
    """Nothing to set."""

    name: str = "constant"


def rate(config: ConstantConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    return peak
