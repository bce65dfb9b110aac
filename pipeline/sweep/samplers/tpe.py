"""Tree-structured Parzen estimator: learns from finished trials where good ones lie."""

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
    """See pipeline.sweep.samplers."""
    return TPESampler(seed=seed)
