"""Expand a sweep's command line into trials: configured, with keys, without duplicates. Starts nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import build, compose
from pipeline.config.build import RunConfig, stored_overrides
from pipeline.config.compose import Overrides, TrialComposer, jobs
from pipeline.config.schema import SweepConfig
from pipeline.config.step_source import StepSource, refuse_idle_words
from pipeline.core.errors import UsageError
from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.specs import Cluster
from pipeline.data import store, trees
from pipeline.data.manifest import Pack
from pipeline.data.trees import Tree
from pipeline.execution.run import code_reader, prepare
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.steps import making
from pipeline.sweep.slots import host_overrides, raw_cluster, slots
from pipeline.sweep.trial import Outcome, Trial


class Grid:
    """The trials of a space in order (a TrialSource)."""

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
        """Do nothing: the trials of a grid are independent."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Do nothing: the trials of a grid are independent."""


_NOT_OF_THE_RUN = ("sweep.", "search=", "search.", "notify.", "hydra.")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The trials of a grid in order. ``duplicates``: combinations that gave the same run as an earlier one.

    ``slots`` are the parts of the cluster on which trials run concurrently.
    """

    trials: tuple[Trial, ...]
    duplicates: int
    slots: tuple[Cluster, ...]
    settings: SweepConfig

    @property
    def key(self) -> str:
        """A digest of the trials' keys, independent of their order; '' while data is missing."""
        digests = [trial.run.key.digest for trial in self.trials if trial.run is not None]
        return sha256_text(canonical_json(sorted(digests)))[:KEY_LENGTH] if len(digests) == len(self.trials) else ""

    @property
    def configurations(self) -> str:
        """A digest of the search space: configurations and topologies, without code, data, environment."""
        each = sorted(configuration_digest(trial.config) for trial in self.trials)
        return sha256_text(canonical_json(each))[:KEY_LENGTH]


def configuration_digest(config: RunConfig) -> str:
    """Return a digest of one configuration and its topology."""
    return sha256_text(canonical_json([config.canonical, config.topology]))


def _identity_without_data(config: RunConfig) -> str:
    """Identify a trial whose data is missing: by its configuration and the inputs of its data."""
    section = dict(config.resolved.get("program") or config.resolved["dataset"])
    source = [section.get("source"), section.get("data"), config.resolved.get("step")]
    return canonical_json([configuration_digest(config), source])


def expand(words: Sequence[str], *, root: Path, local_gpus: int) -> Space:
    """Return all trials of a command line.

    Args:
        words: Hydra overrides with sweep values (comma lists, choice, range, glob), ``sweep=NAME`` for a grid.
        root: the project.
        local_gpus: the number of local GPUs.

    Raises:
        UsageError: an invalid override or value; if only one trial has it, with that trial's overrides.
    """
    return of_jobs(jobs(words), root=root, local_gpus=local_gpus)


def of_jobs(combinations: Sequence[Overrides], *, root: Path, local_gpus: int) -> Space:
    """Return the trials of combinations that Hydra has already expanded."""
    factory = TrialFactory(root=root, local_gpus=local_gpus)
    common = set(combinations[0]).intersection(*combinations[1:]) if combinations else set()
    for word in (word for job in combinations for word in job if word not in common):
        _refuse_equal_trials(word)
    trials: list[Trial] = []
    seen: set[str] = set()
    with compose.hydra_ready():
        for job in combinations:
            chosen = tuple(word for word in job if word not in common)
            trial = factory.trial(len(trials), chosen, job)
            identity = trial.run.key.digest if trial.run is not None else _identity_without_data(trial.config)
            if identity not in seen:
                seen.add(identity)
                trials.append(trial)
    return Space(
        trials=tuple(trials),
        duplicates=len(combinations) - len(trials),
        slots=factory.slots(),
        settings=factory.settings,
    )


def _refuse_equal_trials(word: str) -> None:
    """Refuse several values of a field that is no part of a run, because all trials would be the same run.

    Most likely the value is a text with a comma.

    Raises:
        UsageError: names the field and the quoting of such a text.
    """
    name = word.lstrip("+").partition("=")[0]
    if name.partition(".")[0] in ("paths", "tracking", "notify"):
        raise UsageError(
            f"{name} is no part of a run, so several values of it make no trials; "
            f"a text with a comma is written {name}=\"'a,b'\""
        )


class TrialFactory:
    """Creates the trials of one sweep from overrides. Use within ``compose.hydra_ready()``."""

    def __init__(self, *, root: Path, local_gpus: int) -> None:
        self._root, self._local_gpus = root, local_gpus
        self._composer = TrialComposer()
        self._sources = code_reader(root)
        self._settings: SweepConfig | None = None  # those of the first trial
        self._slots: dict[str, tuple[Cluster, ...]] = {}  # by the cluster section
        self._packs: dict[str, Pack | None] = {}

    @property
    def settings(self) -> SweepConfig:
        assert self._settings is not None, "a sweep has at least one trial"
        return self._settings

    def slots(self) -> tuple[Cluster, ...]:
        """Return the parts of the cluster for concurrent trials; empty if the trials differ in their clusters."""
        if len(self._slots) == 1:
            return next(iter(self._slots.values()))
        if any(len(slots) > 1 for slots in self._slots.values()) and self.settings.slots != "auto":
            raise UsageError("sweep.nodes and sweep.slots need one cluster, and the trials differ in cluster")
        return ()

    def forget_packs(self) -> None:
        """Look up data packs again; call after one was fetched."""
        self._packs.clear()

    def trial(self, number: int, chosen: Overrides, overrides: Overrides) -> Trial:
        """Configure a trial for the hosts of the first slot.

        Args:
            number: counts from 0.
            chosen: those of ``overrides`` that distinguish the trial.
            overrides: all overrides of the trial.

        Raises:
            UsageError: an invalid override or value; from the second trial on, the text begins with ``chosen``.
        """
        try:
            return self._trial(number, chosen, overrides)
        except UsageError as error:
            if number == 0:
                raise
            raise UsageError(f"trial {' '.join(chosen)}: {error.what}", hint=error.hint) from error

    def _trial(self, number: int, chosen: Overrides, overrides: Overrides) -> Trial:
        resolved = self._composer.resolve(overrides)
        whole = build.build(
            resolved, overrides, root=self._root, local_gpus=self._local_gpus, shares_batch=False, steps=self._step
        )
        refuse_idle_words(resolved, whole.step)
        self._settings = self._settings or whole.sweep
        if whole.sweep != self._settings:
            raise UsageError("sweep.… says how the whole sweep runs; it can't differ from trial to trial")
        cluster = self._slots_of(resolved, whole)[0]
        if whole.script is None:
            build.refuse_uneven(whole.train.trainer, cluster)
        section = raw_cluster(whole.resolved["cluster"], whole.cluster, cluster)
        config = dataclasses.replace(
            whole,
            cluster=cluster,
            resolved={**whole.resolved, "cluster": section},
            overrides=_without_sweep_words(whole.overrides, host_overrides(whole.cluster, cluster)),
        )
        pack = self._pack(config)
        run = prepare(config, self._root, pack, self._sources) if pack is not None else None
        shown = stored_overrides(chosen, resolved, config.secrets)
        return Trial(number=number, chosen=shown, overrides=config.overrides, config=config, run=run)

    def _step(self, text: str, resolved: Mapping[str, Any]) -> StepSource:
        return making.data_step(text, resolved, self._root)

    def _slots_of(self, resolved: Mapping[str, Any], whole: RunConfig) -> tuple[Cluster, ...]:
        section = canonical_json(resolved["cluster"])
        if section not in self._slots:
            gpus = _gpu_names(self._local_gpus) if whole.cluster.device == "cuda" else []
            self._slots[section] = slots(whole.cluster, whole.sweep, gpus)
        return self._slots[section]

    def _pack(self, config: RunConfig) -> Pack | Tree | None:
        if config.step is not None and config.step.path is None:
            return None
        if config.script is not None:
            return trees.tree(config.script.data, config.data_dir)
        wanted = canonical_json([dataclasses.asdict(config.train.dataset), str(config.data_dir)])
        if wanted not in self._packs:
            self._packs[wanted] = store.find(config.train.dataset, config.data_dir)
        return self._packs[wanted]


def _without_sweep_words(overrides: Overrides, host_words: Overrides) -> Overrides:
    """Drop overrides that only control the sweep, and replace those of the fields that ``host_words`` set."""
    dropped = (*_NOT_OF_THE_RUN, *(f"{word.partition('=')[0]}=" for word in host_words))
    return (*(word for word in overrides if not word.lstrip("+").startswith(dropped)), *host_words)


def _gpu_names(count: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",")][:count]
    return [str(number) for number in range(count)]
