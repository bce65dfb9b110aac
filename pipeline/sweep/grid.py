"""A grid: all trials are known beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipeline.sweep.expand import Space, configuration_digest
from pipeline.sweep.sweep_file import SweepRecord
from pipeline.sweep.trial import Outcome, Trial


class Grid:
    """The trials of a space, one after the other (a TrialSource)."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = trials
        self._next = 0

    @property
    def total(self) -> int:
        return len(self._trials)

    def next_trial(self) -> Trial | None:
        if self._next == len(self._trials):
            return None
        self._next += 1
        return self._trials[self._next - 1]

    def watch(self, running: Sequence[Trial]) -> None:
        """Nothing to do: no trial of a grid depends on another."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Nothing to do: no trial of a grid depends on another."""


def in_order(space: Space, about: SweepRecord) -> Space:
    """The trials in the order that sweep.json has written down (``shuffle`` makes another one each time)."""
    places = {item.configuration: item.number for item in about.trials}
    if not places:
        return space
    ordered = sorted(space.trials, key=lambda trial: places.get(configuration_digest(trial.config), len(places)))
    renumbered = (dataclasses.replace(trial, number=number) for number, trial in enumerate(ordered))
    return dataclasses.replace(space, trials=tuple(renumbered))
