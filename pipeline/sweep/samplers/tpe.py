"""``search=tpe``: the tree-structured Parzen estimator, which models promising regions from the finished trials."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.samplers import BaseSampler, TPESampler

from pipeline.config.overrides.search_space import SearchSpace
from pipeline.config.schema import SearchConfig


@dataclass(kw_only=True)
class TPEConfig(SearchConfig):
    """Nothing more to set."""

    name: str = "tpe"


def sampler(config: TPEConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """Return the sampler of one trial, see pipeline.sweep.samplers."""
    return TPESampler(seed=seed)
