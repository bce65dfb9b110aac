"""A search by Optuna: the study in the sweep's folder, and a source of trials that the study suggests and prunes.

After a crash, trials that were in progress are handed out again with the same numbers. Imports optuna (0.3 s).
"""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.specs import State
from pipeline.runs import acceptance, metrics_file
from pipeline.runs.result import nonfinite
from pipeline.sweep.expand import fetch, make_step
from pipeline.sweep.search_plan import STUDY, Objective, SearchPlan, has_value_each_epoch, objectives
from pipeline.sweep.trial import Outcome, Trial
from trainers.contract import run_folder

_STUDY = "search"
_LOCK_S = 60  # to wait while another process writes the study
_SEEDS = 1_000_003  # a prime, so that small search seeds and trial numbers never give equal sampler seeds
_STATES = {TrialState.COMPLETE: State.FINISHED, TrialState.PRUNED: State.PRUNED, TrialState.FAIL: State.FAILED}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A trial that the study suggests."""

    number: int  # from 0
    overrides: tuple[str, ...]
    state: State | None = None  # the recorded end; None: the trial has to be run


class SearchStudy:
    """A study with a fixed total of trials, created by ``open_study``.

    The study may also hold copies (see ``tell``), whose attribute ``of`` is the number of the trial that they replace.
    Numbers here don't count copies, so they may differ from Optuna's.
    """

    def __init__(self, study: optuna.Study, config: SearchConfig, space: SearchSpace, total: int) -> None:
        self.total = total
        self._study, self._config, self._space = study, config, space
        self._trials = [trial for trial in study.get_trials(deepcopy=False) if "of" not in trial.user_attrs]
        self.begun = len(self._trials)
        self._live: dict[int, optuna.Trial] = {}  # by number: handed out by this command and not ended
        self._next_number = 0

    def ask(self) -> Suggestion | None:
        """Return the next trial: first those of earlier commands in order, then new ones; None after the last one."""
        number, self._next_number = self._next_number, self._next_number + 1
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
            optuna_number = len(self._study.get_trials(deepcopy=False))  # of the new trial
            self._study.sampler = _sampler(self._config, self._space, optuna_number)
            trial = self._study.ask()
        self._live[number] = trial
        values = {name: _suggest(trial, name, item) for name, item in self._space.dimensions.items()}
        if number == len(self._trials):  # a new trial, which the study now has with its values
            self._trials.append(self._study.get_trials(deepcopy=False)[trial.number])
        return Suggestion(number=number, overrides=self._words(values))

    def tell(self, number: int, state: State, values: Sequence[float] = ()) -> None:
        """Record a trial's end: FINISHED with the objectives' ``values``, PRUNED or FAILED. Repeated calls do no harm.

        A study never changes a recorded result. So if a later command finishes a failed trial, a copy is added.
        """
        stored = self._trials[number]
        trial = self._live.pop(number, None)
        if state is State.FINISHED and any(math.isnan(value) for value in values):
            state = State.FAILED
        if trial is not None:
            optuna_state = {ours: theirs for theirs, ours in _STATES.items()}[state]
            values_or_none = list(values) if state is State.FINISHED else None
            self._trials[number] = self._study.tell(trial.number, values=values_or_none, state=optuna_state)
        elif stored.state is TrialState.FAIL and state is State.FINISHED:
            self._trials[number] = self._add_copy(number, stored, values)

    def best(self) -> tuple[int, ...]:
        """Return the number of the best finished trial; with several objectives, of all Pareto-optimal trials."""
        numbers = {trial.number: number for number, trial in enumerate(self._trials)}  # by Optuna's number
        best = self._study.best_trials
        return tuple(trial.user_attrs["of"] if "of" in trial.user_attrs else numbers[trial.number] for trial in best)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Record the metric of an epoch (from 1); return True if the trial should be pruned now."""
        trial = self._live.get(number)
        if trial is None or len(self._study.directions) > 1:  # Optuna's pruners need a single objective
            return False
        # an attempt that was restarted repeats the epochs after its checkpoint
        if epoch not in self._study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(value, epoch)
        return trial.should_prune()

    def _words(self, values: dict[str, Any]) -> tuple[str, ...]:
        return tuple(f"{name}={item.text(values[name])}" for name, item in self._space.dimensions.items())

    def _add_copy(self, number: int, failed: FrozenTrial, values: Sequence[float]) -> FrozenTrial:
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
    """Open the study of a sweep folder, or create it. ``search_plan.check`` must have passed.

    ``made_of``: see ``SearchPlan.made_of``. ``epochs``: the most epochs that a trial can have. Raises UsageError: the
    existing study has another space or other settings, or has more trials already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        study = _study(config, folder, epochs)
        begun = sum("of" not in trial.user_attrs for trial in study.get_trials(deepcopy=False))
        _refuse_changes(study, json.loads(json.dumps(made_of)), folder)  # as the study returns it: tuples are lists
    except UsageError:
        raise
    except Exception as error:  # sqlite, SQLAlchemy, Optuna and unpickling errors have no common class
        path, reason = folder / STUDY, (str(error) or repr(error)).splitlines()[0]
        raise UsageError(
            f"{path} can't be read as the study of this search: {reason}",
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
        storage=optuna.storages.RDBStorage(database, engine_kwargs={"connect_args": {"timeout": _LOCK_S}}),
        sampler=RandomSampler(seed=0),  # replaced for each trial
        pruner=_pruner(config, epochs),
        directions=[StudyDirection[goal.direction.upper()] for goal in objectives(config)],
        load_if_exists=True,
    )


def _refuse_changes(study: optuna.Study, made_of: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with a study that was begun with something else than ``made_of``. Raises UsageError."""
    stored = study.user_attrs.get("made_of")
    if stored is None:
        study.set_user_attr("made_of", made_of)
        return
    rows = []
    for part in made_of:
        for name in sorted({*stored[part], *made_of[part]}):
            before, now = stored[part].get(name), made_of[part].get(name)
            if before != now:
                label = f"search.{name}" if part == "search" else name
                texts = ("not there" if value is None else str(value) for value in (before, now))
                rows.append(f"  {label}: {' → '.join(texts)}")
    if rows:
        raise UsageError(
            "\n".join([f"the search in {folder} was begun otherwise, and its trials would mislead this one:", *rows]),
            hint="the words it was begun with, or --fork, which begins a new search beside it",
        )


def _sampler(config: SearchConfig, space: SearchSpace, optuna_number: int) -> BaseSampler:
    """Return the sampler of a trial, with a seed of its own, so that a continued search draws the same values."""
    seed = (config.seed * _SEEDS + optuna_number) % 2**32
    sampler: BaseSampler = OPTIONS["search"].module(config.name).sampler(config, space, seed)
    return sampler


def _pruner(config: SearchConfig, epochs: int) -> BasePruner:
    """Return the pruner of the search."""
    if config.pruner == "median":
        # epochs count from 1, Optuna's steps from 0
        return MedianPruner(n_startup_trials=config.startup_trials, n_warmup_steps=config.warmup_epochs + 1)
    if config.pruner == "hyperband":
        # Without max_resource Optuna would infer the length of a trial from finished trials, and a continued search
        # could put a trial into another bracket.
        return HyperbandPruner(
            min_resource=config.min_epochs, max_resource=epochs, reduction_factor=config.reduction_factor
        )
    return NopPruner()


def _suggest(trial: optuna.Trial, name: str, item: Dimension) -> Any:
    if isinstance(item, Choice):
        return trial.suggest_categorical(name, item.values)
    if item.whole:
        return trial.suggest_int(name, int(item.low), int(item.high), step=int(item.step or 1), log=item.log)
    return trial.suggest_float(name, item.low, item.high, step=item.step, log=item.log)


# -------------------------------------------------------------------------------- the source of trials
class SearchSource:
    """The trials that a study suggests (a TrialSource).

    ``on_trial``: called with each trial before it starts. ``say``: receives messages about the making of its data.
    """

    def __init__(
        self, study: SearchStudy, plan: SearchPlan, on_trial: Callable[[Trial], None], say: Callable[[str], None]
    ) -> None:
        self._study, self._plan, self._on_trial, self._say = study, plan, on_trial, say
        self._goals = objectives(plan.config)
        first_metric = self._goals[0].metric
        self._is_script = plan.representative_trial.config.script is not None
        # which metrics a script logs repeatedly is unknown, so its metric is read only if the pruner needs it
        is_read = plan.config.pruner != "none" if self._is_script else has_value_each_epoch(first_metric)
        self._metric = first_metric if is_read else None
        self._epochs: dict[int, _Epochs] = {}  # by number of the trial
        self._pruning: set[int] = set()  # numbers of the trials that were told to end

    @property
    def total(self) -> int:
        return self._study.total

    def next_trial(self) -> Trial | None:
        """Return the next trial that the study suggests, and make or fetch the trial's data if it is missing."""
        suggestion = self._study.ask()
        if suggestion is None:
            return None
        overrides = (*self._plan.space.fixed, *suggestion.overrides)

        def configured() -> Trial:
            return self._plan.factory.trial(suggestion.number, suggestion.overrides, overrides)

        # a trial has a key only once its data is there, so it is configured again after each step towards that
        trial = configured()
        if trial.run is None:
            if make_step(trial.config, self._say):
                trial = configured()
            fetch(trial.config, self._say)
            self._plan.factory.forget_packs()
            trial = configured()
        self._on_trial(trial)
        return trial

    def watch(self, running: Sequence[Trial]) -> None:
        """Report new epochs to the pruner, and create the file ``prune`` in the folder of each pruned trial."""
        for trial in running:
            self._report(trial)
            # on each call, because the start of another attempt removes the file
            if trial.number in self._pruning and trial.run is not None and trial.run.folder.path.is_dir():
                (trial.run.folder.path / run_folder.PRUNE).touch()

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Pass a result to the search. Raises PacelineError: the run lacks the objective's figure."""
        self._report(trial)
        self._pruning.discard(trial.number)
        if outcome.state is State.KILLED:  # the same command goes on with the trial
            return
        values = []
        if outcome.state is State.FINISHED and trial.run is not None:
            result, _ = acceptance.result_or_accepted(trial.run.folder)
            values = [_value(goal, result.fields if result is not None else {}, trial) for goal in self._goals]
        self._study.tell(trial.number, outcome.state, values)

    def _report(self, trial: Trial) -> None:
        if self._metric is None or trial.run is None:
            return
        path = trial.run.folder.path / run_folder.METRICS
        epochs = self._epochs.setdefault(trial.number, _Epochs(path, self._metric, by_step=self._is_script))
        for epoch, value in epochs.read_new():
            if self._study.report(trial.number, epoch, value):
                self._pruning.add(trial.number)


def _value(goal: Objective, result: Mapping[str, Any], trial: Trial) -> float:
    if _has_diverged(goal.metric, result, trial):
        return math.nan  # counts as a failed trial instead of ending the search
    value = goal.value(result)
    if value is None:
        has_val_split = any(name.startswith("val/") for name in result.get("metrics", ()))
        needs_val_split = has_value_each_epoch(goal.metric) and not has_val_split
        hint = "dataset.val_size=…, which takes val images from the training images"
        raise PacelineError(
            f"trial {trial.number} ({trial.key}) has no {goal.metric}, which the search looks at",
            hint=hint if needs_val_split else "another search.metric",
        )
    return value


def _has_diverged(metric: str, result: Mapping[str, Any], trial: Trial) -> bool:
    """Return True if the metric became NaN or infinite and stayed so. Then the value in the result doesn't count."""
    if metric not in nonfinite(result) or trial.run is None:
        return False
    # metrics.jsonl has the finite values only
    rows = metrics_file.rows(trial.run.folder.path / run_folder.METRICS)
    last_step = max((row.step for row in rows if metric in row.metrics), default=None)
    return last_step is None or last_step < result["nonfinite"][metric]["step"]


class _Epochs:
    """Reads one metric by epoch from a metrics.jsonl that grows. ``by_step``: by step, because scripts log steps."""

    def __init__(self, path: Path, metric: str, *, by_step: bool = False) -> None:
        self._path, self._metric, self._by_step = path, metric, by_step
        self._read_bytes = 0

    def read_new(self) -> Iterator[tuple[int, float]]:
        """Yield (epoch from 1 or step, value) of new lines. A file that was truncated is read from its beginning."""
        try:
            with self._path.open("rb") as file:
                self._read_bytes = self._read_bytes if self._read_bytes <= self._path.stat().st_size else 0
                file.seek(self._read_bytes)
                content = file.read()
        except (FileNotFoundError, IsADirectoryError):
            return
        complete = content[: content.rfind(b"\n") + 1]  # the last line may still be being written
        self._read_bytes += len(complete)
        for line in complete.splitlines():
            row = metrics_file.parse(line)
            if row is None or self._metric not in row.metrics:
                continue
            number = row.step if self._by_step else row.epoch
            if number is not None:
                yield number, row.metrics[self._metric]
