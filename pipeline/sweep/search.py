"""A search as a source of trials: passes the metrics of running trials to its study, and prunes trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.errors import PacelineError
from pipeline.core.specs import State
from pipeline.runs import acceptance, metrics_file
from pipeline.runs.result import nonfinite
from pipeline.sweep.search_plan import Objective, SearchPlan, fetch, has_value_each_epoch, make_step, objectives
from pipeline.sweep.study import SearchStudy
from pipeline.sweep.trial import Outcome, Trial
from trainers.contract import run_folder


class SearchSource:
    """The trials that a study suggests (a TrialSource).

    Args:
        on_trial: called with each trial before it starts.
        say: receives messages of a step that makes a trial's data.
    """

    def __init__(
        self, study: SearchStudy, plan: SearchPlan, on_trial: Callable[[Trial], None], say: Callable[[str], None]
    ) -> None:
        self._study, self._plan, self._on_trial, self._say = study, plan, on_trial, say
        self._goals = objectives(plan.config)
        first = self._goals[0].metric
        self._is_script = plan.representative_trial.config.script is not None
        prunes = plan.config.pruner != "none" if self._is_script else has_value_each_epoch(first)
        self._metric = first if prunes else None
        self._epochs: dict[int, _Epochs] = {}
        self._pruning: set[int] = set()

    @property
    def total(self) -> int:
        return self._study.total

    def next_trial(self) -> Trial | None:
        """Return the next trial that the study suggests. Fetches missing data of the trial."""
        suggestion = self._study.ask()
        if suggestion is None:
            return None
        overrides = (*self._plan.space.fixed, *suggestion.overrides)

        def configured() -> Trial:
            return self._plan.factory.trial(suggestion.number, suggestion.overrides, overrides)

        trial = configured()
        if trial.run is None:
            if make_step(trial.config, self._say):
                trial = configured()
            fetch(trial.config)
            self._plan.factory.forget_packs()
            trial = configured()
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
        self._study.tell(trial.number, outcome.state, values)

    def _report(self, trial: Trial) -> None:
        if self._metric is None or trial.run is None:
            return
        path = trial.run.folder.path / run_folder.METRICS
        epochs = self._epochs.setdefault(trial.number, _Epochs(path, self._metric, by_step=self._is_script))
        for epoch, value in epochs.new():
            if self._study.report(trial.number, epoch, value):
                self._pruning.add(trial.number)

    def _values(self, trial: Trial) -> list[float]:
        assert trial.run is not None
        result, _ = acceptance.result_or_accepted(trial.run.folder)
        return [_value(goal, result.fields if result is not None else {}, trial) for goal in self._goals]


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
    """Return True if no finite value of the metric follows its first non-finite one. Then its last value is void."""
    if metric not in nonfinite(result) or trial.run is None:
        return False
    rows = metrics_file.rows(trial.run.folder.path / run_folder.METRICS)
    last = max((row.step for row in rows if metric in row.metrics), default=None)
    return last is None or last < result["nonfinite"][metric]["step"]


class _Epochs:
    """Reads one metric from a growing metrics.jsonl by epoch (``by_step``: by step, as scripts log)."""

    def __init__(self, path: Path, metric: str, *, by_step: bool = False) -> None:
        self._path, self._metric, self._by_step = path, metric, by_step
        self._read_bytes = 0

    def new(self) -> Iterator[tuple[int, float]]:
        """Yield (epoch from 1 or step, value) of new lines; starts over if the file was truncated."""
        try:
            with self._path.open("rb") as file:
                self._read_bytes = self._read_bytes if self._read_bytes <= self._path.stat().st_size else 0
                file.seek(self._read_bytes)
                new = file.read()
        except (FileNotFoundError, IsADirectoryError):
            return
        complete = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        for line in complete.splitlines():
            row = metrics_file.parse(line)
            if row is None or self._metric not in row.metrics:
                continue
            number = row.step if self._by_step else row.epoch
            if number is not None:
                yield number, row.metrics[self._metric]
