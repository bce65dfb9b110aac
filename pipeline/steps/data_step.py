"""Steps as sources of a run's data (``dataset.source=step:clean``), and those that an earlier run's data came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.step_source import StepState, named_step
from pipeline.core.errors import UsageError
from pipeline.core.files import expanded
from pipeline.data.manifest import origin_of
from pipeline.runs.folder import RunFolder
from pipeline.steps import step_folders
from pipeline.steps.graph import Graph, earlier_of
from pipeline.steps.making import make_all
from pipeline.steps.step import PREFIX, named


@dataclass(frozen=True, kw_only=True)
class DataStep:
    """The step ``name`` of ``graph``; ``inside`` is the path in its folder, '' for its single file or all of it."""

    name: str
    inside: str
    graph: Graph

    @property
    def path(self) -> Path | None:
        """The path of its output; None while it must run. Raises UsageError: the step is invalid."""
        standing = self.graph.standing(self.name)
        return step_folders.as_source(standing.step, standing.made, self.inside) if standing.made is not None else None

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Run it and the steps it needs; return how many were run. Raises PacelineError."""
        return make_all(self.graph, [self.name], say, at_once=at_once)

    def standings(self) -> list[StepState]:
        """Return the states of it and all steps it needs, in order. Raises UsageError."""
        return [state_in_words(self.graph, name) for name in self.graph.order([self.name])]


def state_in_words(graph: Graph, name: str) -> StepState:
    """Describe the state of a step in words. Raises UsageError."""
    standing = graph.standing(name)
    where = standing.made.folder.name if standing.made is not None else "; ".join(standing.why)
    return StepState(name=name, made=standing.made is not None, why=where, needs=standing.step.upstream)


def data_step(text: str, composed: Mapping[str, Any], root: Path) -> DataStep:
    """Return the step named by ``step:NAME``.

    Raises UsageError: there is none, or whether it is done can't be decided.
    """
    name, inside = named(text)
    graph = graph_of(composed, root)
    graph.step(name)
    return DataStep(name=name, inside=inside, graph=graph)


def graph_of(composed: Mapping[str, Any], root: Path) -> Graph:
    """Return the graph of all steps for a resolved configuration. Raises UsageError."""
    runs_dir = root / expanded(str(composed["paths"]["runs"]), "paths.runs")
    return Graph(composed, root=root, runs_dir=runs_dir)


# --------------------------------------------------------------- where the data of an earlier run came from
@dataclass(frozen=True, kw_only=True)
class PastStep:
    """A step as it was run then. ``key`` is '' if unknown; ``needs`` are the steps before it."""

    name: str
    key: str = ""
    needs: tuple[PastStep, ...] = ()

    def __str__(self) -> str:
        before = f" ({', '.join(map(str, self.needs))} before it)" if self.needs else ""
        return f"step {self.name} {self.key}".rstrip() + before


def past_step(folder: RunFolder, config: Mapping[str, Any]) -> PastStep | None:
    """Return the step that the run's data came from, or None. ``config`` is the content of its config.json."""
    runs_dir = folder.path.parent
    with suppress(UsageError, AttributeError):  # a damaged config.json
        source = named_step(config)
        if source is None:
            return None
        name, _ = named(source.text)
        made = _made(folder.path / "data", runs_dir, name)
        return PastStep(name=name) if made is None else _past(name, made, runs_dir)
    return None


def _made(pack: Path, runs_dir: Path, name: str) -> Path | None:
    """Return the step folder that the images of a data pack came from."""
    origin, steps = origin_of(pack), step_folders.steps_dir(runs_dir)
    if origin is None or steps not in origin.parents:
        return None
    made = steps / origin.relative_to(steps).parts[0]
    return made if made.name.rpartition("-")[0] == name else None


def _past(name: str, made: Path, runs_dir: Path) -> PastStep:
    return PastStep(name=name, key=made.name.rpartition("-")[2], needs=tuple(_before(made, runs_dir)))


def _before(made: Path, runs_dir: Path) -> Iterator[PastStep]:
    """Yield the steps whose outputs this one used, each once."""
    record = step_folders.record_of(made)
    files_by_step: dict[str, dict[str, str]] = {}
    for label, sha256 in (record.inputs if record is not None else {}).items():
        if label.startswith(PREFIX):
            name, inside = named(label)
            files_by_step.setdefault(name, {})[inside] = sha256
    for name, files in files_by_step.items():
        folders = (path for path, earlier in earlier_of(runs_dir, name) if files.items() <= earlier.files.items())
        past = next(folders, None)
        yield PastStep(name=name) if past is None else _past(name, past, runs_dir)
