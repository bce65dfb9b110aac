"""The plan of a search: objectives, space and settings, parsed from the command line and checked. Needs no optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import compose
from pipeline.config.build import search_config
from pipeline.config.overrides.search_space import Choice, SearchSpace, space
from pipeline.config.overrides.trials import parsed_words
from pipeline.config.schema import SearchConfig, SweepConfig
from pipeline.core import program as programs
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.specs import Cluster
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.runs.contents import makes_another_run
from pipeline.sweep.expand import TrialFactory, configuration_digest
from pipeline.sweep.results import MAXIMIZE, MINIMIZE
from pipeline.sweep.trial import Trial

STUDY = "search.db"
"""Optuna's study, in the folder of the sweep."""
_PRUNERS = ("none", "median", "hyperband")
_METRICS_OF_EACH_EPOCH = ("val/accuracy", "val/loss")
_METRICS_OF_THE_END = ("test/accuracy", "test/loss", "train_s", "duration_s", "images_per_s")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One figure that a search looks at."""

    metric: str  # a field of result.json; with a slash (val/accuracy) one of its ``metrics``
    direction: str  # maximize or minimize

    def value(self, result: Mapping[str, Any]) -> float | None:
        """Return the figure of a finished run; None if it is missing."""
        figure = result.get("metrics", {}).get(self.metric, result.get(self.metric))
        return float(figure) if isinstance(figure, int | float) else None


def objectives(config: SearchConfig) -> tuple[Objective, ...]:
    """Return the objectives of the search. Raises UsageError: a text isn't a metric and a direction."""
    goals = []
    for word in config.objectives or [f"{config.metric} {config.direction}"]:
        metric, _, direction = word.strip().rpartition(" ")
        if direction not in (MAXIMIZE, MINIMIZE):
            raise UsageError(
                f"search: {word!r} is no objective; write a metric and maximize or minimize, as in "
                "search.objectives='[val/accuracy maximize, train_s minimize]'"
            )
        goals.append(Objective(metric=metric, direction=direction))
    return tuple(goals)


def has_value_each_epoch(metric: str) -> bool:
    """Return True if a run has the metric after each evaluation of the val split."""
    return metric.startswith("val/")


def most_epochs(space: SearchSpace, resolved: Mapping[str, Any]) -> int:
    """Return the most epochs that a trial can have: ``trainer.epochs`` may be varied itself."""
    item = space.dimensions.get("trainer.epochs")
    values = item.values if item is not None else (resolved["trainer"]["epochs"],)
    if values is None:  # infinitely many, and hyperband asks before a trial is composed, which would refuse them
        raise UsageError("trainer.epochs takes whole numbers", hint="trainer.epochs='int(interval(1,5))'")
    return max(int(value) for value in values)


def check(config: SearchConfig, space: SearchSpace, resolved: Mapping[str, Any]) -> None:
    """Refuse settings whose errors would only show after the first trials. ``resolved``: without the varied values."""
    if config.pruner not in _PRUNERS:
        raise UsageError(f"search.pruner={config.pruner}: {suggestion(config.pruner, _PRUNERS)}")
    for name in ("n_trials", "startup_trials", "min_epochs"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"search.{name}={value} must be at least 1")
    if config.warmup_epochs < 0 or config.seed < 0 or config.reduction_factor < 2:
        raise UsageError("search.warmup_epochs and search.seed must be at least 0, search.reduction_factor at least 2")
    if not space.dimensions:
        raise UsageError(
            f"search={config.name} has nothing to vary; give it optimizer.lr='tag(log, interval(1e-3,1))', "
            "model=small_cnn,resnet18 or trainer.global_batch_size='range(32,129,32)'"
        )
    config.check(space)
    _check_metrics(config, space, resolved)


def _check_metrics(config: SearchConfig, space: SearchSpace, resolved: Mapping[str, Any]) -> None:
    goals = objectives(config)
    if not programs.of(resolved).is_ours:  # a script's metrics are unknown before it runs
        if config.pruner == "hyperband":
            raise UsageError(
                "search.pruner=hyperband divides the epochs of a trial, and a script has none; take median, which "
                "compares the steps at which scripts log (search.warmup_epochs counts these), or none"
            )
        if config.pruner != "none":
            _refuse_several(config, goals)
        return
    names = (resolved.get("trainer") or {}).get("metrics") or ()
    own_metrics = [f"{split}/{name}" for name in names for split in ("val", "test")]
    known_metrics = (*_METRICS_OF_EACH_EPOCH, *_METRICS_OF_THE_END, *own_metrics)
    for item in goals:
        if item.metric not in known_metrics:
            raise UsageError(f"search: no run has a metric {item.metric!r}; {suggestion(item.metric, known_metrics)}")
    # if the data set varies, some trials may have val images
    varies_data = any(name.startswith("dataset") for name in space.dimensions)
    has_no_val = not varies_data and not resolved["dataset"]["val_size"]
    for item in goals:
        if has_value_each_epoch(item.metric) and has_no_val:
            raise UsageError(
                f"search: runs without val images have no {item.metric} (dataset.val_size=0); set dataset.val_size "
                "to take some from the training images"
            )
    if config.pruner == "none":
        return
    _refuse_several(config, goals)
    if config.pruner == "hyperband" and config.min_epochs > (epochs := most_epochs(space, resolved)):
        raise UsageError(
            f"search.min_epochs={config.min_epochs} must not be above the {epochs} epochs of a trial (trainer.epochs)"
        )
    if not has_value_each_epoch(goals[0].metric):
        raise UsageError(
            f"search.pruner={config.pruner} needs a metric that a run has every epoch, not {goals[0].metric}; "
            f"valid: {', '.join(name for name in known_metrics if has_value_each_epoch(name))}"
        )


def _refuse_several(config: SearchConfig, goals: Sequence[Objective]) -> None:
    if len(goals) > 1:
        raise UsageError(f"search.pruner={config.pruner} needs a single objective; take search.pruner=none")


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """A search as requested."""

    config: SearchConfig
    space: SearchSpace
    epochs: int  # the most that a trial can have
    representative_trial: Trial  # one point of the space, for properties that all trials share
    factory: TrialFactory  # creates the trials, within ``compose.hydra_ready()``
    slots: tuple[Cluster, ...]
    settings: SweepConfig

    @property
    def made_of(self) -> dict[str, Any]:
        """What earlier and new trials must share, or earlier values would mislead the search: part → name → value."""
        settings = {name: value for name, value in vars(self.config).items() if name != "n_trials"}
        trial = self.representative_trial
        key = trial.key or configuration_digest(trial.config)
        return {"space": self.space.described(), "search": settings, "runs": {"key of a trial": key}}

    @property
    def total(self) -> int:
        return self.config.total(self.space)

    @property
    def key(self) -> str:
        """A digest of code, data, environment, fixed overrides, space and search settings except ``n_trials``."""
        return sha256_text(canonical_json(self.made_of))[:KEY_LENGTH]


def plan(words: Sequence[str], *, root: Path, local_gpus: int) -> SearchPlan:
    """Plan the search of a command line: ``search=NAME`` and overrides, some of several values. Raises UsageError."""
    with compose.hydra_ready():
        search_space = space(parsed_words(words))
        factory = TrialFactory(root=root, local_gpus=local_gpus)
        for name in search_space.dimensions:
            if not makes_another_run(name):
                raise UsageError(f"{name} is no part of a run, so a search can't vary it; give it one value")
        resolved = compose.resolve(compose.compose_now(search_space.fixed))
        config = search_config(resolved)
        check(config, search_space, resolved)
        # one point of the space shows errors of the configuration before anything is stored or started
        first_values = tuple(
            f"{name}={item.values[0] if isinstance(item, Choice) else item.text(item.low)}"
            for name, item in search_space.dimensions.items()
        )
        representative_trial = factory.trial(0, first_values, (*search_space.fixed, *first_values))
    return SearchPlan(
        config=config,
        space=search_space,
        epochs=most_epochs(search_space, resolved),
        representative_trial=representative_trial,
        factory=factory,
        slots=factory.slots(),
        settings=factory.settings,
    )
