"""``search=grid``: every combination of choices and ranges, in an order drawn from the seed."""

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
    """Nothing more to set; with ``n_trials`` null, all combinations are tried."""

    name: str = "grid"

    def check(self, space: SearchSpace) -> None:
        """Require a finite list of values for each dimension."""
        if space.infinite:
            name = space.infinite[0]
            raise UsageError(
                f"search=grid can't list {name}: an interval has no end of values; "
                f"write {name}='range(a,b,step)' or single values, or take search=tpe"
            )

    def total(self, space: SearchSpace) -> int:
        """Return n_trials, limited by the number of combinations."""
        size = math.prod(len(item.values or ()) for item in space.dimensions.values())
        return min(size, self.n_trials or size)


class _Grid(GridSampler):
    """Optuna's grid sampler without its call of ``study.stop``, which fails outside ``study.optimize``."""

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None: ...


def sampler(config: GridConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """Return the sampler of one trial, see pipeline.sweep.samplers."""
    # the search's seed orders the whole grid, so all trials have it instead of their own
    return _Grid({name: item.values or () for name, item in space.dimensions.items()}, seed=config.seed)
