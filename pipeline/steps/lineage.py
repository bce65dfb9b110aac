"""The steps that a run's data came from, read from the run's and the steps' folders; conf/step/ is not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.step_source import named_step
from pipeline.core.errors import UsageError
from pipeline.data.manifest import origin_of
from pipeline.runs.folder import RunFolder
from pipeline.steps import store
from pipeline.steps.graph import earlier_of
from pipeline.steps.step import PREFIX, named


@dataclass(frozen=True, kw_only=True)
class PastStep:
    """A step as it was run then. ``key`` is '' if unknown; ``needs`` are the steps before it."""

    name: str
    key: str = ""
    needs: tuple[PastStep, ...] = ()


def of_run(folder: RunFolder, config: Mapping[str, Any]) -> PastStep | None:
    """Return the step that the run's data came from, or None. ``config`` is the content of its config.json."""
    runs_dir = folder.path.parent
    with suppress(UsageError, AttributeError):  # a damaged config.json
        source = named_step(config)
        if source is None:
            return None
        name, _ = named(source[2])
        made = _made(folder.path / "data", runs_dir, name)
        return PastStep(name=name) if made is None else _past(name, made, runs_dir)
    return None


def _made(pack: Path, runs_dir: Path, name: str) -> Path | None:
    """Return the step folder that the images of a data pack came from."""
    origin, steps = origin_of(pack), store.steps_dir(runs_dir)
    if origin is None or steps not in origin.parents:
        return None
    made = steps / origin.relative_to(steps).parts[0]
    return made if made.name.rpartition("-")[0] == name else None


def _past(name: str, made: Path, runs_dir: Path) -> PastStep:
    return PastStep(name=name, key=made.name.rpartition("-")[2], needs=tuple(_before(made, runs_dir)))


def _before(made: Path, runs_dir: Path) -> Iterator[PastStep]:
    """Yield the steps whose outputs this one used, each once."""
    inputs = ((store.record_of(made) or {}).get("parts") or {}).get("data") or {}
    taken: dict[str, dict[str, str]] = {}
    for label, sha256 in inputs.items():
        if label.startswith(PREFIX):
            name, inside = named(label)
            taken.setdefault(name, {})[inside] = sha256
    for name, files in taken.items():
        folders = (path for path, record in earlier_of(runs_dir, name) if files.items() <= record["files"].items())
        past = next(folders, None)
        yield PastStep(name=name) if past is None else _past(name, past, runs_dir)
