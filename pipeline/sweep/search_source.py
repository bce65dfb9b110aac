"""The TrialSource of a search: passes epochs of running trials to the pruner, and results to the search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.build import RunConfig
from pipeline.core.errors import PacelineError
from pipeline.core.specs import State
from pipeline.data import store
from pipeline.runs import acceptance, metrics_file
from pipeline.runs.result import nonfinite
from pipeline.sweep.search_plan import Objective, SearchPlan, has_value_each_epoch, objectives
from pipeline.sweep.trial import Outcome, Trial
from trainers.contract import run_folder

if TYPE_CHECKING:  # imports optuna
    from pipeline.sweep.search import Search

OnTrial = Callable[[Trial], None]


def make_step(config: RunConfig, say: Callable[[str], None]) -> bool:
    """Run the step that a trial's data comes from, if necessary. False: nothing was run."""
    return config.step is not None and config.step.path is None and config.step.make(say) > 0


def fetch(config: RunConfig) -> None:
    """Fetch the data set of a trial if it is missing."""
    if config.script is None and store.find(config.train.dataset, config.data_dir) is None:
        store.fetch(config.train.dataset, config.data_dir)


class Searching:
    """A TrialSource on top of a search.

    ``on_trial`` is called for each trial before it starts, ``say`` reports steps.
    """

    def __init__(self, search: Search, plan: SearchPlan, on_trial: OnTrial, say: Callable[[str], None]) -> None:
        self._say = say
        self._search, self._plan, self._on_trial = search, plan, on_trial
        self._goals = objectives(plan.config)
        first = self._goals[0].metric
        self._is_script = plan.representative_trial.config.script is not None
        prunes = plan.config.pruner != "none" if self._is_script else has_value_each_epoch(first)
        self._metric = first if prunes else None
        self._read: dict[int, _Epochs] = {}
        self._pruning: set[int] = set()

    @property
    def total(self) -> int:
        return self._search.total

    def next_trial(self) -> Trial | None:
        """Return trials of earlier calls first, with their numbers. Fetches missing data of the trial."""
        suggestion = self._search.ask()
        if suggestion is None:
            return None
        words = (*self._plan.space.fixed, *suggestion.overrides)
        trial = self._plan.factory.trial(suggestion.number, suggestion.overrides, words)
        if trial.run is None:
            if make_step(trial.config, self._say):
                trial = self._plan.factory.trial(suggestion.number, suggestion.overrides, words)
            fetch(trial.config)
            self._plan.factory.forget_packs()
            trial = self._plan.factory.trial(suggestion.number, suggestion.overrides, words)
        self._on_trial(trial)
        return trial

    def watch(self, running: Sequence[Trial]) -> None:
        """Report new epochs to the pruner, and create the file ``prune`` in the folder of each pruned trial.

        The file is created on each call, because the start of another attempt removes it.
        """
        for trial in running:
            self._report(trial)
            if trial.number in self._pruning and trial.run is not None and trial.run.folder.path.is_dir():
                (trial.run.folder.path / run_folder.PRUNE).touch()

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Pass a result to the search; killed trials stay open.

        Raises PacelineError: the run lacks the objective's figure.
        """
        self._report(trial)
        self._pruning.discard(trial.number)
        if outcome.state is State.KILLED:
            return
        values = self._values(trial) if outcome.state is State.FINISHED else []
        self._search.tell(trial.number, outcome.state, values)

    def _report(self, trial: Trial) -> None:
        if self._metric is None or trial.run is None:
            return
        path = trial.run.folder.path / run_folder.METRICS
        epochs = self._read.setdefault(trial.number, _Epochs(path, self._metric, by_step=self._is_script))
        for epoch, value in epochs.new():
            if self._search.report(trial.number, epoch, value):
                self._pruning.add(trial.number)

    def _values(self, trial: Trial) -> list[float]:
        assert trial.run is not None
        result, _ = acceptance.standing(trial.run.folder)
        return [_value(goal, result.fields if result is not None else {}, trial) for goal in self._goals]


def _value(goal: Objective, result: Mapping[str, Any], trial: Trial) -> float:
    if _has_diverged(goal.metric, result, trial):
        return math.nan  # counts as a failed trial instead of ending the search
    value = goal.value(result)
    if value is None:
        hint = "dataset.val_size=…, which takes val images from the training images"
        raise PacelineError(
            f"trial {trial.number} ({trial.key}) has no {goal.metric}, which the search looks at",
            hint=hint if has_value_each_epoch(goal.metric) else "another search.metric",
        )
    return value


def _has_diverged(metric: str, result: Mapping[str, Any], trial: Trial) -> bool:
    """Return True if no finite value of the metric followed its first non-finite one, so its last value is
    meaningless."""
    if metric not in nonfinite(result) or trial.run is None:
        return False
    path = trial.run.folder.path / run_folder.METRICS
    rows = map(metrics_file.parse, path.read_bytes().splitlines()) if path.is_file() else ()
    last = max((row.step for row in rows if row is not None and metric in row.metrics), default=None)
    return last is None or last < result["nonfinite"][metric]["step"]


class _Epochs:
    """Reads one metric from a growing metrics.jsonl by epoch (``by_step``: by step, as scripts log)."""

    def __init__(self, path: Path, metric: str, *, by_step: bool = False) -> None:
        self._path, self._metric, self._by_step, self._at = path, metric, by_step, 0

    def new(self) -> Iterator[tuple[int, float]]:
        """Yield (epoch from 1 or step, value) of new lines; starts over if the file was truncated."""
        try:
            with self._path.open("rb") as file:
                self._at = self._at if self._at <= self._path.stat().st_size else 0
                file.seek(self._at)
                part = file.read()
        except (FileNotFoundError, IsADirectoryError):
            return
        whole = part[: part.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            row = metrics_file.parse(line)
            if row is None or self._metric not in row.metrics:
                continue
            at = row.step if self._by_step else row.epoch
            if at is not None:
                yield at, row.metrics[self._metric]
