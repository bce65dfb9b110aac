"""The session: what the function of each verb is called with, namely one command's configuration, data and run.

All of it is found on first use and kept, because up-to-date checks and verbs of one command ask for the same.
"""

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

if TYPE_CHECKING:  # Hydra, steps and sweeps are slow to import, and few commands need them
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
                config = self._build_config()
        remember_in(ROOT, config.runs_dir)
        unexpected.keep_tracebacks_in(config.runs_dir)
        return config

    def refuse_wrong_words(self) -> None:
        """Raise UsageError for wrong overrides, and for initial weights (``init.weights``) that don't exist."""
        _ = self.config
        if not self.sweeps:
            _ = self.initial_weights

    @property
    def initial_weights(self) -> InitialWeights | None:
        """The initial weights that the configuration names; None: random ones. Raises UsageError: they don't exist."""
        if not self.config.train.init.setting:
            return None
        return initial_weights_of(self.config, ROOT)

    def _build_config(self) -> RunConfig:
        """Compose the configuration of one run, or read it from the run that ``run=KEY`` names; check it as a whole."""
        resolved, words = self._resolved(), self.invocation.overrides
        attaches_to_any = self.invocation.verb == "attach" and not self.invocation.names_run
        if attaches_to_any or self._takes_stored_config:
            from pipeline.cli import named_run  # imports the launch, which only a named run needs

            if attaches_to_any:
                self.invocation = named_run.with_run_in_progress(self.invocation, resolved, ROOT)
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
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # config.json of a named run is damaged
            if not self._takes_stored_config:
                raise
            raise named_run.damaged_error(self.invocation.options["run"], error, self.invocation.verb) from error
        if self.invocation.verb == "train":
            step_source.refuse_unused_steps(resolved, config.step)
        masking.remember(config.secrets)
        if config.tracking.uri is not None:
            tracking.absolute_uri(config.tracking.uri, ROOT)  # for its check: it refuses a wrong address
        if self.invocation.verb in ("train", "sweep") and (config.tracking.tracker or config.tracking.tensorboard):
            refuse_missing(config.tracking)
        return config

    @property
    def _takes_stored_config(self) -> bool:
        """Whether the configuration comes from the run that ``run=KEY`` names; other verbs need only its folder."""
        return self.invocation.verb in ("why", "attach") and "run" in self.invocation.options

    def _resolved(self) -> dict[str, Any]:
        """Return the composed configuration as plain containers; from the memo if these words were composed before."""
        memo = ComposeMemo(ROOT, self._composed_words)
        if self._composed is None and (remembered := memo.recall()) is not None:
            return remembered
        from pipeline.config import compose  # imports Hydra, half a second, which the memo saves

        if self._composed is not None:
            return compose.resolve(self._composed)
        resolved = compose.resolve(compose.compose_config(self._composed_words))
        # the memo is a file in the runs folder, which only a training may create; `doit plan` writes nothing
        verb = VERBS.get(self.invocation.verb or "")
        lists_runs = verb is not None and verb.overrides == "filter" and (ROOT / resolved["paths"]["runs"]).is_dir()
        if self.invocation.verb == "train" or lists_runs:
            memo.keep(resolved)
        return resolved

    @property
    def _composed_words(self) -> tuple[str, ...]:
        """The overrides to compose."""
        if self.invocation.verb not in ("reproduce", "prove"):
            return self.invocation.overrides
        # these are passed on to the training that repeats the run; here nothing is known of its program
        of_repetition = ("program.ignore_metrics=", *(("cluster.",) if self.invocation.verb == "reproduce" else ()))
        return tuple(word for word in self.invocation.overrides if not word.lstrip("+~").startswith(of_repetition))

    @property
    def sweeps(self) -> bool:
        """Whether the overrides describe several trials; `doit plan` takes a run or a sweep. Raises UsageError."""
        verb = VERBS.get(self.invocation.verb or "")
        if self.invocation.verb == "plan":
            from pipeline.config.overrides.trials import jobs  # not before: Hydra's parser of overrides

            return len(jobs(self.invocation.overrides)) > 1
        return verb is not None and verb.sweeps

    @property
    def searches(self) -> bool:
        """Whether a search (``search=tpe``) chooses the trials, and not a grid of values."""
        words = [word for word in self.invocation.overrides if word.startswith("search=")]
        return self.sweeps and bool(words) and words[-1] != "search=none"

    @cached_property
    def search_plan(self) -> SearchPlan:
        """The search that the overrides describe. Raises UsageError."""
        from pipeline.sweep.search_plan import plan  # imports Hydra, which only sweeps need here

        return plan(self.invocation.overrides, root=ROOT, local_gpus=usable_gpus())

    @cached_property
    def space(self) -> Space:
        """The trials that the overrides describe, each with its run. Raises UsageError."""
        from pipeline.sweep.expand import expand  # imports Hydra, which only sweeps need here

        with waiting(note, "composing the trials, each of which is a run with a key"):
            return expand(self.invocation.overrides, root=ROOT, local_gpus=usable_gpus())

    @cached_property
    def pack(self) -> Pack | Tree | None:
        """The data as nodes read them (a script's: its files as they are); None if they are missing or damaged."""
        if self.config.step is not None and self.config.step.path is None:  # the step that makes them has not run
            return None
        if self.config.script is not None:
            from pipeline.data import trees  # imported for scripts alone

            return trees.tree(self.config.script.data, self.config.data_dir)
        return store.find(self.config.train.dataset, self.config.data_dir)

    @cached_property
    def steps(self) -> Graph:
        """The user's steps in this configuration, with their order."""
        from pipeline.steps import making  # imports OmegaConf, which only steps need here

        return making.graph_of(self._resolved(), ROOT)

    def forget_steps(self) -> None:
        """Compose anew and look up the data anew after steps were made, because a step may make the data."""
        self.__dict__.pop("config", None)
        self.forget_run()

    def forget_run(self) -> None:
        """Look up data, run and trials anew after data or initial weights, which are part of the key, were made."""
        for name in ("pack", "run", "space", "search_plan"):
            self.__dict__.pop(name, None)

    @cached_property
    def run(self) -> Run | None:
        """The run of this configuration; None until its data is here, because the data are part of its key."""
        return prepare(self.config, ROOT, self.pack) if self.pack else None

    def refuse_unfetchable_data(self) -> None:
        """Raise DataError if data are missing that `doit fetch` could not fetch either."""
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
            from pipeline.runs import index  # most commands name no run

            return index.find(self.config.runs_dir, key)
        self.refuse_unfetchable_data()
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
    """Return the step that ``dataset.source=step:…`` (``text``) names."""
    from pipeline.steps import making  # imports OmegaConf, which only steps need here

    return making.data_step(text, resolved, ROOT)


def relative(path: Path) -> str:
    """Return the path as a user in the project folder would type it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
