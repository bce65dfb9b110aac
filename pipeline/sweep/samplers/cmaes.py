"""``search=cmaes``: the evolution strategy CMA-ES, for two or more numbers. Dimensions that are choices are random."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.samplers import BaseSampler, CmaEsSampler

from pipeline.config.overrides.search_space import SearchSpace
from pipeline.config.schema import SearchConfig
from pipeline.core.errors import UsageError


@dataclass(kw_only=True)
class CMAESConfig(SearchConfig):
    """Nothing more to set."""

    name: str = "cmaes"

    def check(self, space: SearchSpace) -> None:
        """Require at least two numbers and a single objective."""
        super().check(space)
        numbers = space.numbers
        if len(numbers) < 2:
            raise UsageError(
                f"search=cmaes needs two numbers to vary (interval or range), and here there is "
                f"{', '.join(numbers) or 'none'}; take search=tpe"
            )
        if len(self.objectives) > 1:
            raise UsageError("search=cmaes has one objective; for several take search=tpe")


def sampler(config: CMAESConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """Return a new sampler for one trial, whose own seed lets a continued search draw the same values.

    The sampler holds no state: Optuna stores that of CMA-ES with the trials of the study, and reads it from there.
    """
    return CmaEsSampler(seed=seed, warn_independent_sampling=False)
