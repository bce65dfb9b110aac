"""A step of one's own that a configuration names as the source of its data. What it is, ``pipeline.steps`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.program import SCRIPT


class StepState(NamedTuple):
    """How one step stands: ``made``, or ``why`` it would be made; ``needs`` are the steps before it."""

    name: str
    made: bool
    why: str
    needs: tuple[str, ...]


class StepSource(Protocol):
    """A step whose output is the data of a run: ``dataset.source=step:clean``."""

    @property
    def path(self) -> Path | None:
        """Where that output lies; None while the step isn't made. Raises UsageError."""
        ...

    @property
    def name(self) -> str:
        """The step's name."""
        ...

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Make it and what it needs; how many were made now. Raises PacelineError."""
        ...

    def standings(self) -> Sequence[StepState]:
        """It and all steps that it needs, in order. Raises UsageError."""
        ...


Steps = Callable[[str, Mapping[str, Any]], StepSource]
"""``step:clean`` and the resolved configuration → that step. What is above this package gives it."""
_UNMADE = {"dataset": "(the step isn't made)", programs.SECTION: "."}
"""What stands for the path of its output until then; nothing reads it."""


def with_step(resolved: Mapping[str, Any], steps: Steps | None) -> tuple[Mapping[str, Any], StepSource | None]:
    """The configuration with the path of a step's output where it names the step, and that step; else as it is.

    Raises:
        UsageError: the step can't be made as it is told, or has no such output.
    """
    named = named_step(resolved)
    if named is None or steps is None:
        return resolved, None
    section, field, text = named
    step = steps(text, resolved)
    path = step.path
    return {**resolved, section: {**resolved[section], field: str(path or _UNMADE[section])}}, step


def refuse_idle_words(resolved: Mapping[str, Any], step: StepSource | None) -> None:
    """Raises UsageError: a word says something of a step, and the run takes no step's output."""
    for name in (resolved.get("step") or {}) if step is None else ():
        raise UsageError(
            f"step.{name} is set, and nothing here needs a step: dataset.source names none",
            hint=f"dataset.source=step:{name}; doit step {name} makes the step alone",
        )


def with_words(placed: Mapping[str, Any], words_of: Mapping[str, Any]) -> dict[str, Any]:
    """``placed`` with the name of a step again where it was told, for config.json."""
    named = named_step(words_of)
    if named is None or named[0] not in placed:
        return dict(placed)
    section, field, text = named
    return {**placed, section: {**placed[section], field: text}}


def named_step(resolved: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Section, field and words of what names a step as the source of the data; None: nothing does."""
    is_script = (resolved.get(programs.SECTION) or {}).get("name") == SCRIPT.name
    section, field = (programs.SECTION, "data") if is_script else ("dataset", "source")
    text = (resolved.get(section) or {}).get(field)
    return (section, field, text) if isinstance(text, str) and text.startswith("step:") else None
