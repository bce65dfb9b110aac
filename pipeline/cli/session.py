"""What the verbs of one command share: its configuration, composed once, its data and its run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import tracking
from pipeline.cli import invocation
from pipeline.cli.invocation import Invocation, parse
from pipeline.cli.output import note
from pipeline.cli.verbs import VERBS
from pipeline.cluster.validation import usable_gpus
from pipeline.config import build, step_source
from pipeline.config.build import RunConfig
from pipeline.config.memo import ComposeMemo
from pipeline.config.overrides.words import for_project
from pipeline.core import masking
from pipeline.core.cache import remember_in
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT as ROOT
from pipeline.core.processes import unexpected
from pipeline.core.processes.threads import waiting
from pipeline.data import store
from pipeline.data.manifest import Pack
from pipeline.execution.run import Run, initial_weights_of, prepare
from pipeline.runs.folder import RunFolder
from pipeline.tracking.destinations import refuse_missing

if TYPE_CHECKING:  # of Hydra, steps and sweeps nothing is imported before it is needed
    from omegaconf import DictConfig

    from pipeline.data.trees import Tree
    from pipeline.execution.initial_weights import InitialWeights
    from pipeline.steps.graph import Graph
    from pipeline.steps.making import DataStep
    from pipeline.sweep.expand import Space
    from pipeline.sweep.search_plan import SearchPlan


class Session:
    """The state of one command. Its properties raise UsageError if an override is wrong."""

    def __init__(self, invocation: Invocation, composed: DictConfig | None = None) -> None:
        """``composed``: the configuration, if `python -m pipeline` has composed it already."""
        self.invocation = invocation
        self._composed = composed

    @cached_property
    def config(self) -> RunConfig:
        """The typed configuration; for a sweep that of its first trial."""
        if self.sweeps:
            trials = [self.search_plan.representative_trial] if self.searches else self.space.trials
            masking.remember(secret for trial in trials for secret in trial.config.secrets)
            config = trials[0].config
        else:
            with waiting(note, "composing the configuration"):
                config = self._built()
        remember_in(ROOT, config.runs_dir)
        unexpected.keep_in(config.runs_dir)
        return config

    def refuse_wrong_words(self) -> None:
        """Refuse wrong overrides, and initial weights that nothing provides. Raises UsageError."""
        _ = self.config
        if not self.sweeps:
            _ = self.initial_weights

    @property
    def initial_weights(self) -> InitialWeights | None:
        """The initial weights; None: fresh ones. Raises UsageError if nothing provides them."""
        if not self.config.train.init.setting:
            return None
        return initial_weights_of(self.config, ROOT)

    def _built(self) -> RunConfig:
        resolved, words = self._resolved(), self.invocation.overrides
        names_none = self.invocation.verb == "attach" and not self.invocation.names_run
        if names_none or self._is_of_named_run:
            from pipeline.cli import named_run  # not before: attempts and their plans, where run=KEY stands for a run

            if names_none:
                self.invocation = named_run.of_the_run_under_way(self.invocation, resolved, ROOT)
            resolved, words = named_run.configuration(self.invocation, resolved, ROOT)
        verb = VERBS.get(self.invocation.verb or "")
        try:
            config = build.build(
                resolved,
                words,
                root=ROOT,
                local_gpus=usable_gpus(),
                shares_batch=verb is None or verb.shares_batch,
                must_exist=verb is None or verb.overrides != "filter",
                steps=_step_source,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # of a damaged config.json
            if not self._is_of_named_run:
                raise
            raise named_run.damaged(self.invocation.options["run"], error, self.invocation.verb) from error
        if self.invocation.verb == "train":
            step_source.refuse_unused_steps(resolved, config.step)
        masking.remember(config.secrets)
        if config.tracking.uri is not None:  # a wrong address is refused before anything starts
            tracking.absolute_uri(config.tracking.uri, ROOT)
        if self.invocation.verb in ("train", "sweep") and (config.tracking.tracker or config.tracking.tensorboard):
            refuse_missing(config.tracking)
        return config

    @property
    def _is_of_named_run(self) -> bool:
        """Whether ``run=KEY`` stands for the words of that run, for a verb that needs its whole configuration."""
        return self.invocation.verb in ("why", "attach") and "run" in self.invocation.options

    def _resolved(self) -> dict[str, Any]:
        """Compose with Hydra; of words that were composed before, read the memo."""
        memo = ComposeMemo(ROOT, self._composed_words)
        if self._composed is None and (remembered := memo.recall()) is not None:
            return remembered
        from pipeline.config import compose  # not before: Hydra, half a second, which the memo spares

        if self._composed is not None:
            return compose.resolve(self._composed)
        resolved = compose.resolve(compose.compose_config(self._composed_words))
        # only a training makes the folder for runs, in which the memo lies
        if self.invocation.verb == "train" or (ROOT / resolved["paths"]["runs"]).is_dir():
            memo.keep(resolved)
        return resolved

    @property
    def _composed_words(self) -> tuple[str, ...]:
        """The overrides to compose; `doit reproduce` gives those about the cluster to the training that it starts."""
        if self.invocation.verb != "reproduce":
            return self.invocation.overrides
        return tuple(word for word in self.invocation.overrides if not word.lstrip("+~").startswith("cluster."))

    @property
    def sweeps(self) -> bool:
        """Whether the overrides stand for several trials. `doit plan` takes a run or a sweep. Raises UsageError."""
        verb = VERBS.get(self.invocation.verb or "")
        if self.invocation.verb == "plan":
            from pipeline.config.overrides.trials import jobs  # not before: Hydra's parser of overrides

            return len(jobs(self.invocation.overrides)) > 1
        return verb is not None and verb.sweeps

    @property
    def searches(self) -> bool:
        """Whether a search chooses the trials."""
        words = [word for word in self.invocation.overrides if word.startswith("search=")]
        return self.sweeps and bool(words) and words[-1] != "search=none"

    @cached_property
    def search_plan(self) -> SearchPlan:
        """The search of the overrides; ``forget_pack`` after a fetch. Raises UsageError."""
        from pipeline.sweep.search_plan import plan  # not before: Hydra, for sweeps alone

        return plan(self.invocation.overrides, root=ROOT, local_gpus=usable_gpus())

    @cached_property
    def space(self) -> Space:
        """The trials of the overrides; ``forget_pack`` after a fetch. Raises UsageError."""
        from pipeline.sweep.expand import expand  # not before: Hydra, for sweeps alone

        return expand(self.invocation.overrides, root=ROOT, local_gpus=usable_gpus())

    @cached_property
    def pack(self) -> Pack | Tree | None:
        """The data pack if it exists and is intact; ``forget_pack`` after a fetch."""
        if self.config.step is not None and self.config.step.path is None:
            return None
        if self.config.script is not None:
            from pipeline.data import trees  # for scripts alone

            return trees.tree(self.config.script.data, self.config.data_dir)
        return store.find(self.config.train.dataset, self.config.data_dir)

    @cached_property
    def steps(self) -> Graph:
        """The steps of this configuration."""
        from pipeline.steps import making  # not before: OmegaConf, for steps alone

        return making.graph_of(self._resolved(), ROOT)

    def forget_steps(self) -> None:
        """Forget the steps after some were made, because they may be the source of the data."""
        self.__dict__.pop("config", None)
        self.forget_pack()

    def forget_pack(self) -> None:
        """Look up data, run and trials anew after data or initial weights were fetched."""
        for name in ("pack", "run", "space", "search_plan"):
            self.__dict__.pop(name, None)

    @cached_property
    def run(self) -> Run | None:
        """The run of this configuration, once its data is in place."""
        return prepare(self.config, ROOT, self.pack) if self.pack else None

    def refuse_data(self) -> None:
        """Refuse data that isn't here and that `doit fetch` would refuse. Raises DataError."""
        if self.sweeps and not self.searches:
            missing = [trial.config for trial in self.space.trials if trial.run is None]
        else:
            missing = [] if self.pack else [self.config]
        for config in missing:
            if config.step is None:
                store.refuse(config.train.dataset)

    def folder(self) -> RunFolder:
        """Return the run that ``run=KEY`` names, or this configuration's. Raises UsageError."""
        if (key := self.invocation.options.get("run")) is not None:
            from pipeline.runs import index  # it lists runs, and most commands name none

            return index.find(self.config.runs_dir, key)
        self.refuse_data()
        if self.run is None:
            raise UsageError(f"{self.why_no_key}; or name a run: run=KEY")
        return self.run.folder

    @property
    def why_no_key(self) -> str:
        """Why the run has no key yet, and what to do."""
        if self.pack is None:
            return "the data set isn't fetched, so this run has no key yet; try doit fetch"
        weights = self.initial_weights
        reason = f"{weights.setting}: {weights.pending}" if weights else "init: "
        return f"{reason}, so this run has no key yet"


@cache
def session() -> Session:
    """Return the session of this process's command line."""
    typed = parse(sys.argv[1:])
    overrides = for_project(typed.overrides, invocation.typed_in(), ROOT)
    return Session(typed._replace(overrides=overrides))


def _step_source(text: str, resolved: Mapping[str, Any]) -> DataStep:
    from pipeline.steps import making  # not before: OmegaConf, for steps alone

    return making.data_step(text, resolved, ROOT)


def relative(path: Path) -> str:
    """Return the path as a user in the project folder would type it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
