"""One cycle: half cosines up and down (Smith, Topin: Super-convergence, 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.core.config import ConfigError, ScheduleConfig


@dataclass(kw_only=True)
class OneCycleConfig(ScheduleConfig):
    """Up to the learning rate, then down to nearly zero (Smith & Topin 2017).

    Attributes:
        warmup: share of all steps on the way up, between 0 and 1.
        div_factor: the run begins at lr / div_factor.
        final_div_factor: and ends at lr / div_factor / final_div_factor.
    """

    name: str = "one_cycle"
    warmup: float = 0.25
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        if not 0 < self.warmup < 1:
            raise ConfigError(f"schedule.warmup={self.warmup} must lie in (0, 1)")


def rate(config: OneCycleConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """Two half cosines: peak/div_factor → peak → peak/div_factor/final_div_factor, as torch's OneCycleLR.

    The last step always has the final rate, however short the decay is. A run of a single step has the peak rate.
    """
    first = peak / config.div_factor
    turn = config.warmup * total_steps - 1  # position of the peak, often between two steps; below 0: no warm-up
    if total_steps == 1:
        return peak
    if step <= turn:
        return _cosine(first, peak, step / turn if turn > 0 else 1.0)
    return _cosine(peak, first / config.final_div_factor, (step - turn) / (total_steps - 1 - turn))


def _cosine(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * min(1.0, share))) / 2
