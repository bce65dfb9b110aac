"""Use a step as the source of a run's data: ``dataset.source=step:clean``, ``program.data=step:clean/images``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.local_gpus import usable_gpus
from pipeline.config.cluster import build_cluster
from pipeline.config.step_source import StepState
from pipeline.core.files import expanded
from pipeline.steps import store
from pipeline.steps.graph import Graph
from pipeline.steps.making import make_all
from pipeline.steps.step import named


@dataclass(frozen=True, kw_only=True)
class DataStep:
    """The step ``name`` of ``graph``; ``inside`` is the path in its folder, '' for its single file or all of it."""

    text: str
    name: str
    inside: str
    graph: Graph

    @property
    def path(self) -> Path | None:
        """The path of its output; None while it must run. Raises UsageError: the step is invalid."""
        standing = self.graph.standing(self.name)
        return store.as_source(standing.step, standing.made, self.inside) if standing.made is not None else None

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Run it and the steps it needs; return how many were run. Raises PacelineError."""

        return make_all(self.graph, [self.name], say, at_once=at_once)

    def standings(self) -> list[StepState]:
        """Return the states of it and all steps it needs, in order. Raises UsageError."""
        return [state(self.graph, name) for name in self.graph.order([self.name])]


def state(graph: Graph, name: str) -> StepState:
    """Describe the state of a step in words. Raises UsageError."""
    standing = graph.standing(name)
    where = standing.made.folder.name if standing.made is not None else "; ".join(standing.why)
    return StepState(name=name, made=standing.made is not None, why=where, needs=standing.step.upstream)


def of(text: str, composed: Mapping[str, Any], root: Path) -> DataStep:
    """Return the step named by ``step:NAME``. Raises UsageError: there is none, or its state is undecidable."""
    name, inside = named(text)
    steps = graph(composed, root)
    steps.step(name)
    return DataStep(text=text, name=name, inside=inside, graph=steps)


def graph(composed: Mapping[str, Any], root: Path) -> Graph:
    """Return the graph of all steps for a resolved configuration. Raises UsageError."""

    def hosts() -> int:
        return build_cluster(composed["cluster"], root=root, local_gpus=usable_gpus()).nnodes

    runs_dir = root / expanded(str(composed["paths"]["runs"]), "paths.runs")
    return Graph(composed, root=root, runs_dir=runs_dir, hosts=hosts)
