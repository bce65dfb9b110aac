"""Every combination of choices and ranges, in an order drawn from the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from optuna.samplers import BaseSampler, GridSampler

from pipeline.config.overrides.search_space import SearchSpace
from pipeline.config.schema import SearchConfig
from pipeline.core.errors import UsageError


@dataclass(kw_only=True)
class GridConfig(SearchConfig):
    """``n_trials`` None: all combinations."""

    name: str = "grid"

    def check(self, space: SearchSpace) -> None:
        """It has to list all values."""
        if space.endless:
            name = space.endless[0]
            raise UsageError(
                f"search=grid can't list {name}: an interval has no end of values; "
                f"write {name}='range(a,b,step)' or single values, or take search=tpe"
            )

    def total(self, space: SearchSpace) -> int:
        """At most as many as there are combinations."""
        size = math.prod(len(item.values or ()) for item in space.dimensions.values())
        return min(size, self.n_trials or size)


class _Grid(GridSampler):
    """Optuna's sampler, which after the last trial would stop ``study.optimize``; here nobody calls that."""

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None: ...


def sampler(config: GridConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """See pipeline.sweep.samplers. Its seed is the order of the whole grid."""
    return _Grid({name: item.values or () for name, item in space.dimensions.items()}, seed=config.seed)
