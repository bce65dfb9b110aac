"""A grid is counted before it is made: none and too many trials are one clear error."""

from __future__ import annotations

import re

import pytest

from pipeline.config import compose
from pipeline.config.compose import jobs
from pipeline.core.errors import UsageError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("seed=range(1,1)", "seed=range(1,1) has no value in it"),
        ("optimizer.lr=range(0,1,-1)", "optimizer.lr=range(0,1,-1) has no value in it"),
        ("model=glob(zz*)", "model=glob(zz*) has no value in it: no option of model has such a name"),
        ("optimizer.lr=range(0,1,0.0)", "needs a step that isn't 0"),
        ("seed=range(nan,2)", "needs three finite numbers"),
        ("seed=range(0,1000000000)", "that would be 1,000,000,000 trials; a sweep takes at most 100,000"),
        ("seed=range(9,-99999999,-1)", "'interval(-99999999,9)'"),
        ("seed=1,2 seed=range(900) optimizer.lr=range(0,1,1e-3)", "optimizer.lr=range(0,1,1e-3) and the other words"),
    ],
)
def test_a_grid_without_trials_or_with_too_many_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        jobs(words.split())


@pytest.mark.slow
def test_the_largest_grid_is_counted_as_it_is_made() -> None:
    words = ["seed=range(0,1)", "seed=range(5,1,-2)", "optimizer.lr=range(0.0,0.3,0.1)", "model=glob(resnet*)"]
    assert len(jobs(words)) == 2 * 3 * len(jobs(["model=glob(resnet*)"]))
    assert len(jobs(["seed=range(0,100000)"])) == 100_000


@pytest.mark.slow
def test_one_run_is_told_of_doit_sweep_whatever_the_sweep_is_written_as() -> None:
    for word in ("seed=1,2", "seed=range(1,1)", "model=glob(*)"):
        with pytest.raises(UsageError, match=rf"^{re.escape(word)}: several values are a sweep.*doit sweep"):
            compose.compose_config(["experiment=quickstart", word])
