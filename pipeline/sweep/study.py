"""The study of a search: Optuna's ask-and-tell interface, stored in the sweep's folder.

Imports optuna (0.3 s), so this module is only imported where a search runs. One process uses a study at a time, ensured
by the sweep's lock. After a crash, trials that were in progress are handed out again with their numbers.
"""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline import tracking
from pipeline.config.overrides.search_space import Choice, Dimension, SearchSpace
from pipeline.config.schema import OPTIONS, SearchConfig
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.sweep.search_plan import STUDY, objectives

_STUDY = "search"
_SEEDS = 1_000_003  # a prime, so that small search seeds and trial numbers never give equal sampler seeds
_STATES = {TrialState.COMPLETE: State.FINISHED, TrialState.PRUNED: State.PRUNED, TrialState.FAIL: State.FAILED}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A trial of a search; ``number`` counts from 0. ``state`` is that of its recorded end; None: it has to be run."""

    number: int
    overrides: tuple[str, ...]
    state: State | None


class SearchStudy:
    """A study with a fixed total of trials, created by ``open_study``."""

    def __init__(self, study: optuna.Study, config: SearchConfig, space: SearchSpace, total: int) -> None:
        self.total = total
        self._study, self._config, self._space = study, config, space
        self._trials = [trial for trial in study.get_trials(deepcopy=False) if "of" not in trial.user_attrs]
        self.begun = len(self._trials)
        self._live: dict[int, optuna.Trial] = {}
        self._next = 0  # number

    def ask(self) -> Suggestion | None:
        """Return the next trial: first those of earlier commands in order, then new ones; None after the last one."""
        number, self._next = self._next, self._next + 1
        if number >= self.total:
            return None
        if number < len(self._trials):
            stored = self._trials[number]
            if stored.state.is_finished():
                return Suggestion(number=number, overrides=self._words(stored.params), state=_STATES[stored.state])
            self._study.sampler = _sampler(self._config, self._space, stored.number)
            # An unfinished trial of an earlier command continues with its stored values.
            trial = optuna.Trial(self._study, stored._trial_id)
        else:
            coming = len(self._study.get_trials(deepcopy=False))  # Optuna's number of the new trial
            self._study.sampler = _sampler(self._config, self._space, coming)
            trial = self._study.ask()
        self._live[number] = trial
        values = {name: _suggest(trial, name, item) for name, item in self._space.dimensions.items()}
        if number == len(self._trials):
            self._trials.append(self._study.get_trials(deepcopy=False)[trial.number])
        return Suggestion(number=number, overrides=self._words(values), state=None)

    def tell(self, number: int, state: State, values: Sequence[float] = ()) -> None:
        """Record a trial's end: FINISHED with the objectives' ``values``, PRUNED or FAILED. Repeated calls do no harm.

        A study never changes a recorded result, so a failed trial whose retry succeeded is recorded as a copy.
        """
        known = self._trials[number]
        trial = self._live.pop(number, None)
        if state is State.FINISHED and any(math.isnan(value) for value in values):
            state = State.FAILED
        if trial is not None:
            optuna_state = {ours: theirs for theirs, ours in _STATES.items()}[state]
            figures = list(values) if state is State.FINISHED else None
            self._trials[number] = self._study.tell(trial.number, values=figures, state=optuna_state)
        elif known.state is TrialState.FAIL and state is State.FINISHED:
            self._trials[number] = self._copy(number, known, values)

    def best(self) -> tuple[int, ...]:
        """Return the number of the best finished trial; with several objectives, of all Pareto-optimal trials."""
        return tuple(trial.user_attrs.get("of", self._number(trial)) for trial in self._study.best_trials)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Record the metric of an epoch (from 1); return True to end the trial now. A known epoch is skipped."""
        trial = self._live.get(number)
        if trial is None or len(self._study.directions) > 1:  # Optuna's pruners need a single objective
            return False
        if epoch not in self._study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(value, epoch)
        return trial.should_prune()

    def _number(self, trial: FrozenTrial) -> int:
        return next(number for number, known in enumerate(self._trials) if known.number == trial.number)

    def _words(self, values: dict[str, Any]) -> tuple[str, ...]:
        return tuple(f"{name}={item.text(values[name])}" for name, item in self._space.dimensions.items())

    def _copy(self, number: int, failed: FrozenTrial, values: Sequence[float]) -> FrozenTrial:
        copies = [trial for trial in self._study.get_trials(deepcopy=False) if trial.user_attrs.get("of") == number]
        if copies:
            return copies[0]
        copy = create_trial(
            values=list(values), params=failed.params, distributions=failed.distributions, user_attrs={"of": number}
        )
        self._study.add_trial(copy)
        return copy


def open_study(
    config: SearchConfig, space: SearchSpace, folder: Path, made_of: Mapping[str, Any], *, epochs: int
) -> SearchStudy:
    """Open the study of a sweep folder, or create it. ``check`` must have passed.

    ``made_of``: part → name → value of everything that all trials share, including the space. ``epochs``: the maximum
    of a trial.

    Raises:
        UsageError: the existing study has another space or other settings, or has more trials already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        study = _study(config, folder, epochs)
        begun = sum("of" not in trial.user_attrs for trial in study.get_trials(deepcopy=False))
        _refuse_changes(study, json.loads(json.dumps(made_of)), folder)
    except UsageError:
        raise
    except Exception as error:  # sqlite, SQLAlchemy, Optuna and unpickling errors have no common class
        path, why = folder / STUDY, (str(error) or repr(error)).splitlines()[0]
        raise UsageError(
            f"{path} can't be read as the study of this search: {why}",
            hint=f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}; the same command begins the search "
            "anew, and finished trials are not trained again",
        ) from error
    total = config.total(space)
    if total < begun:
        raise UsageError(
            f"search.n_trials={total}, but {begun} trials of this search have begun; give at least {begun}",
            hint=f"search.n_trials={begun}",
        )
    return SearchStudy(study, config, space, total)


def _study(config: SearchConfig, folder: Path, epochs: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", ExperimentalWarning)
    database = tracking.sqlite_uri(folder / STUDY)
    return optuna.create_study(
        study_name=_STUDY,
        storage=optuna.storages.RDBStorage(database, engine_kwargs={"connect_args": {"timeout": 60}}),
        sampler=RandomSampler(seed=0),  # replaced for each trial
        pruner=_pruner(config, epochs),
        directions=[StudyDirection[goal.direction.upper()] for goal in objectives(config)],
        load_if_exists=True,
    )


def _refuse_changes(study: optuna.Study, made_of: dict[str, Any], folder: Path) -> None:
    known = study.user_attrs.get("made_of")
    if known is None:
        study.set_user_attr("made_of", made_of)
        return
    rows = []
    for part in made_of:
        for name in sorted({*known[part], *made_of[part]}):
            before, now = known[part].get(name), made_of[part].get(name)
            if before != now:
                label = f"search.{name}" if part == "search" else name
                rows.append(f"  {label}: {_shown(before)} → {_shown(now)}")
    if rows:
        raise UsageError(
            "\n".join([f"the search in {folder} was begun otherwise, and its trials would mislead this one:", *rows]),
            hint="the words it was begun with, or --fork, which begins a new search beside it",
        )


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)


def _sampler(config: SearchConfig, space: SearchSpace, number: int) -> BaseSampler:
    """Return the sampler of a trial, whose seed derives from the trial's number."""
    seed = (config.seed * _SEEDS + number) % 2**32
    made: BaseSampler = OPTIONS["search"].module(config.name).sampler(config, space, seed)
    return made


def _pruner(config: SearchConfig, epochs: int) -> BasePruner:
    """Return the pruner of the search.

    Hyperband gets the length of a trial explicitly. Otherwise Optuna would infer it from finished trials, and a
    continued search could put a trial into another bracket.
    """
    if config.pruner == "median":
        # epochs count from 1, Optuna's steps from 0
        return MedianPruner(n_startup_trials=config.startup_trials, n_warmup_steps=config.warmup_epochs + 1)
    if config.pruner == "hyperband":
        return HyperbandPruner(
            min_resource=config.min_epochs, max_resource=epochs, reduction_factor=config.reduction_factor
        )
    return NopPruner()


def _suggest(trial: optuna.Trial, name: str, item: Dimension) -> Any:
    """Return the trial's value of a dimension: the stored value, or a new one."""
    if isinstance(item, Choice):
        return trial.suggest_categorical(name, item.values)
    if item.whole:
        return trial.suggest_int(name, int(item.low), int(item.high), step=int(item.step or 1), log=item.log)
    return trial.suggest_float(name, item.low, item.high, step=item.step, log=item.log)
