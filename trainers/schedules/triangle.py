"""Linear warm-up, then linear decay."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.core.config import ConfigError, ScheduleConfig, below_one


@dataclass(kw_only=True)
class TriangleConfig(ScheduleConfig):
    """In a straight line from ``start`` × lr up to lr over ``warmup`` of all steps, then down to ``end`` × lr.

    No step has a rate of exactly ``start`` or ``end``, which may be 0: on the way up of n steps (often no whole number)
    the first step is 1/(n + 1) of the way above ``start``, and on the way down of n steps the last one 1/n of the way
    above ``end``. If the way down is shorter than a step, the run ends at the top.

    Attributes:
        warmup: share of all steps on the way up, from 0 (down from the first step) to below 1.
        start: share of lr at which the way up begins.
        end: share of lr at which the way down ends.
    """

    name: str = "triangle"
    warmup: float = 0.2
    start: float = 0.2
    end: float = 0.0

    def __post_init__(self) -> None:
        below_one("schedule.warmup", self.warmup)
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name}={getattr(self, name)} must lie in [0, 1]")


def rate(config: TriangleConfig, peak: float, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    turn = config.warmup * total_steps
    if step < turn:
        return peak * (config.start + (1 - config.start) * (step + 1) / (turn + 1))
    return peak * (config.end + (1 - config.end) * (total_steps - step) / (total_steps - turn))
