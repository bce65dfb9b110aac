"""How far a metric of a run moves by itself: what other arithmetic may change it by, where bits can't be compared.

Rounding otherwise moves a training about as far as another seed does. Two of the same spread differ by less than twice
its root of two in about 95 of 100 cases.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.keys.diff import differences
from pipeline.reproduction.recipe import Recipe
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder

_SEEDS = {"seed", "program.args.seed"}
_FEWEST = 3  # runs that tell a spread
_ACCURACY = "test/accuracy"
_REACH = 2 * math.sqrt(2)


def reach(recipe: Recipe, runs_dir: Path) -> dict[str, float]:
    """Metric → by how much two runs of other seeds differ at most, as a rule.

    By the finished runs in ``runs_dir`` that differ from the run in the seed alone, at least three with itself. Where
    there are fewer, of the test accuracy alone: by the number of images that it was counted on.
    """
    values = defaultdict[str, list[float]](list)
    for metrics in _of_seeds(recipe, runs_dir).values():
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values[name].append(value)
    found = {name: _REACH * statistics.stdev(told) for name, told in values.items() if len(told) >= _FEWEST}
    if _ACCURACY in values and _ACCURACY not in found and (images := _test_images(recipe)):
        share = (recipe.result["metrics"][_ACCURACY] * images + 1) / (images + 2)  # neither 0 nor 1
        found[_ACCURACY] = _REACH * math.sqrt(share * (1 - share) / images)
    return found


def _of_seeds(recipe: Recipe, runs_dir: Path) -> dict[str, Mapping[str, Any]]:
    """The metrics of the run and of those that differ from it in the seed alone, by key."""
    found: dict[str, Mapping[str, Any]] = {recipe.folder.key: recipe.result.get("metrics") or {}}
    for key, parts in index.finished_parts(runs_dir).items():
        differing = {item.field for item in differences(recipe.parts, parts)}
        if key not in found and differing <= _SEEDS:
            with suppress(AlteredError):
                result = RunFolder(runs_dir / key).read_result()
                found |= {key: result.metrics} if result is not None else {}
    return found


def _test_images(recipe: Recipe) -> int:
    targets = (recipe.folder.read_json(run_folder.PREDICTIONS) or {}).get("targets")
    return len(targets) if isinstance(targets, list) else 0
