"""``search=random``: each trial is drawn independently of the others."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.samplers import BaseSampler, RandomSampler

from pipeline.config.overrides.search_space import SearchSpace
from pipeline.config.schema import SearchConfig


@dataclass(kw_only=True)
class RandomConfig(SearchConfig):
    """Nothing more to set."""

    name: str = "random"


def sampler(config: RandomConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """Return the sampler of one trial, see pipeline.sweep.samplers."""
    return RandomSampler(seed=seed)
