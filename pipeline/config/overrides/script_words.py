"""Overrides about a script, as they are typed in a folder → as Hydra reads them in the project.

Placeholders ({run}) are quoted, paths become relative to the project, and the script's working directory is added.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.overrides.words import NAME_A_SCRIPT, quoted_run
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_value

_PATH_FIELDS = ("program.script", "program.data")
_TEXT_FIELDS = ("program.args", "program.env")
_BARE_TEXT = r"[^\s,\[\]{}'\"]*+"
_BEGINS = r"(?<![^\s,\[\]{}'\"])"  # else a long text without a placeholder is tried from each of its characters
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_RESUME = r"\{resume:[^\s,{}'\"]+\}"
_UNQUOTED_PLACEHOLDERS = re.compile(
    rf"{_QUOTED}|({_BEGINS}{_BARE_TEXT}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}|{_RESUME}){_BARE_TEXT})+)"
)
_SCRIPT_WORDS = tuple(f"{field}=" for field in NAME_A_SCRIPT)
_SETS_WORKDIR = ("program.workdir=", "experiment=")
_NEEDS_NO_QUOTES = re.compile(r"[\w./-]+")


def for_project(words: Sequence[str], folder: Path, root: Path) -> tuple[str, ...]:
    """Convert overrides typed in ``folder`` to what Hydra reads in the project ``root``.

    {run} is quoted, because Hydra would read it as a mapping. A path of a script or of data in ``folder`` becomes
    relative to ``root``; the script's working directory becomes ``folder``.

    Raises UsageError: a word about Hydra itself.
    """
    for word in words:
        if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):  # Paceline has a run's folder, log and process
            raise UsageError(
                f"{word} sets Hydra's own application, of which doit takes the configuration alone",
                hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
            )
    placed = [quoted_run(_with_quoted_placeholders(_with_project_path(word, folder, root))) for word in words]
    return (*placed, *_workdir(placed, folder, root))


def _workdir(words: Sequence[str], folder: Path, root: Path) -> list[str]:
    """Return ``program.workdir=FOLDER`` if the words name a script and ``folder`` lies below the project.

    A script that an experiment names keeps its working directory, so that every folder gives the same run.
    """
    named = [word.partition("=")[2].strip("'\"") for word in words if word.startswith(_SCRIPT_WORDS)]
    if not named or folder == root or not folder.is_relative_to(root):
        return []
    if named[0].startswith(("/", "~")) or any(word.lstrip("+~").startswith(_SETS_WORKDIR) for word in words):
        return []
    inside = folder.relative_to(root).as_posix()
    quoted = inside.replace("\\", "\\\\").replace("'", "\\'")
    return [f"program.workdir={inside}" if _NEEDS_NO_QUOTES.fullmatch(inside) else f"program.workdir='{quoted}'"]


def _with_project_path(word: str, folder: Path, root: Path) -> str:
    """Make the path of a script or of data relative to the project, if it exists in ``folder``."""
    field, _, typed = word.partition("=")
    value = typed.strip("'\"")
    if folder == root or field not in _PATH_FIELDS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={hydra_value(str(path.relative_to(root) if path.is_relative_to(root) else path))}"


def _with_quoted_placeholders(word: str) -> str:
    """Quote placeholders such as {run} in a script's arguments and variables: Hydra would read mappings."""
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXT_FIELDS) or (
        field.endswith("program.args") and value.startswith("{resume:")
    ):
        return word
    return f"{field}{equals}{_UNQUOTED_PLACEHOLDERS.sub(lambda match: repr(match[1]) if match[1] else match[0], value)}"
