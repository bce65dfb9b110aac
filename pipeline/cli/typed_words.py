"""Overrides about a script as people type them, made into what Hydra reads, from the project's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import clone
from pipeline.config.override_words import quoted_run
from pipeline.core.errors import UsageError

_PATHS = ("program.script", "program.data")
_TEXTS = ("program.args", "program.env")
_PART = r"[^\s,\[\]{}'\"]*"
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_UNQUOTED = re.compile(rf"{_QUOTED}|({_PART}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}){_PART})+)")


def for_project(words: Sequence[str]) -> tuple[str, ...]:
    """The words with {run} in quotes, which Hydra takes for a mapping otherwise; and with a script or data that lies
    where the command was typed by its path from the project's folder. Raises UsageError: a word about Hydra itself."""
    for word in words:
        _refuse_hydra(word)
    folder = clone.started_in()
    return tuple(quoted_run(_quoted(_placed(word, folder))) for word in words)


def _refuse_hydra(word: str) -> None:
    """They are composed, and nothing reads them: a run's folder, its log and its process are Paceline's."""
    if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):
        raise UsageError(
            f"{word} sets Hydra's own application, of which doit takes the configuration alone",
            hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
        )


def _placed(word: str, folder: Path) -> str:
    field, _, value = word.partition("=")
    if folder == clone.ROOT or field not in _PATHS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={path.relative_to(clone.ROOT) if path.is_relative_to(clone.ROOT) else path}"


def _quoted(word: str) -> str:
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXTS):
        return word
    return f"{field}{equals}{_UNQUOTED.sub(lambda found: repr(found[1]) if found[1] else found[0], value)}"
