"""A user's step as the source of a run's data (``dataset.source=step:clean``): the interface, and the replacement of
``step:clean`` in a configuration by the path of the step's output. ``pipeline.steps`` implements the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.program import SCRIPT


class StepState(NamedTuple):
    """The state of one step."""

    name: str
    made: bool
    why: str  # if it is made, the name of its output's folder, else the reasons to make it
    needs: tuple[str, ...]  # the steps that it depends on


class NamedStep(NamedTuple):
    """The field of a configuration that names a step, and its ``text``: ``step:clean``."""

    section: str
    field: str
    text: str


class StepSource(Protocol):
    """A step whose output is the data of a run: ``dataset.source=step:clean``."""

    @property
    def path(self) -> Path | None:
        """The path of the step's output; None while the step isn't made. Raises UsageError."""
        ...

    @property
    def name(self) -> str:
        """The step's name."""
        ...

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Make the step and the steps that it needs; return how many were made. Raises PacelineError."""
        ...

    def states(self) -> Sequence[StepState]:
        """Return the states of this step and of all steps that it needs, in order. Raises UsageError."""
        ...


Steps = Callable[[str, Mapping[str, Any]], StepSource]
"""Finds the step that a text ``step:clean`` names in a resolved configuration. The cli provides such a function."""
_UNMADE = {"dataset": "(the step isn't made)", programs.SECTION: "."}
"""By section, what stands for the path of an output that isn't made yet; nothing reads it."""


def with_step(resolved: Mapping[str, Any], steps: Steps | None) -> tuple[Mapping[str, Any], StepSource | None]:
    """Return the configuration with the output's path in place of ``step:NAME``, and the step, or None without one.

    Raises UsageError: the step can't be made with these settings, or has no such output.
    """
    named = named_step(resolved)
    if named is None or steps is None:
        return resolved, None
    step = steps(named.text, resolved)
    path = str(step.path or _UNMADE[named.section])
    return {**resolved, named.section: {**resolved[named.section], named.field: path}}, step


def refuse_unused_steps(resolved: Mapping[str, Any], step: StepSource | None) -> None:
    """Raise UsageError for overrides ``step.NAME.…`` if the run doesn't use the output of a step."""
    for name in (resolved.get("step") or {}) if step is None else ():
        raise UsageError(
            f"step.{name} is set, and nothing here needs a step: dataset.source names none",
            hint=f"dataset.source=step:{name}; doit step {name} makes the step alone",
        )


def with_step_named(with_data: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``with_step`` for config.json: put the step's name, which ``resolved`` has, into ``with_data`` again."""
    named = named_step(resolved)
    if named is None or named.section not in with_data:
        return dict(with_data)
    return {**with_data, named.section: {**with_data[named.section], named.field: named.text}}


def named_step(resolved: Mapping[str, Any]) -> NamedStep | None:
    """Return the step that a configuration names as the source of its data, or None."""
    is_script = (resolved.get(programs.SECTION) or {}).get("name") == SCRIPT.name
    section, field = (programs.SECTION, "data") if is_script else ("dataset", "source")
    text = (resolved.get(section) or {}).get(field)
    return NamedStep(section, field, text) if isinstance(text, str) and text.startswith("step:") else None
