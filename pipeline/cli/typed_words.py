"""Overrides about a script as people type them, made into what Hydra reads, from the project's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import clone
from pipeline.config.override_words import NAME_A_SCRIPT, quoted_run
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_value

_PATHS = ("program.script", "program.data")
_TEXTS = ("program.args", "program.env")
_PART = r"[^\s,\[\]{}'\"]*"
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_RESUME = r"\{resume:[^\s,{}'\"]+\}"
_UNQUOTED = re.compile(rf"{_QUOTED}|({_PART}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}|{_RESUME}){_PART})+)")
_OF_A_SCRIPT = tuple(f"{field}=" for field in NAME_A_SCRIPT)
_NAMES_ANOTHER = ("program.workdir=", "experiment=")
_PLAIN = re.compile(r"[\w./-]+")


def for_project(words: Sequence[str]) -> tuple[str, ...]:
    """The words with {run} in quotes, which Hydra takes for a mapping otherwise; and with a script or data that lies
    where the command was typed by its path from the project's folder, and that folder as its working directory. Raises
    UsageError: a word about Hydra itself."""
    for word in words:
        _refuse_hydra(word)
    folder = clone.started_in()
    placed = [quoted_run(_quoted(_placed(word, folder))) for word in words]
    return (*placed, *_workdir(placed, folder))


def _workdir(words: Sequence[str], folder: Path) -> list[str]:
    """``program.workdir`` for who names a script of the project in a folder below it: a script opens what lies there.
    Where an experiment names the script the run is the same from every folder."""
    named = [word.partition("=")[2].strip("'\"") for word in words if word.startswith(_OF_A_SCRIPT)]
    if not named or folder == clone.ROOT or not folder.is_relative_to(clone.ROOT):
        return []
    if named[0].startswith(("/", "~")) or any(word.lstrip("+~").startswith(_NAMES_ANOTHER) for word in words):
        return []
    inside = folder.relative_to(clone.ROOT).as_posix()
    quoted = inside.replace("\\", "\\\\").replace("'", "\\'")
    return [f"program.workdir={inside}" if _PLAIN.fullmatch(inside) else f"program.workdir='{quoted}'"]


def _refuse_hydra(word: str) -> None:
    """They are composed, and nothing reads them: a run's folder, its log and its process are Paceline's."""
    if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):
        raise UsageError(
            f"{word} sets Hydra's own application, of which doit takes the configuration alone",
            hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
        )


def _placed(word: str, folder: Path) -> str:
    field, _, typed = word.partition("=")
    value = typed.strip("'\"")
    if folder == clone.ROOT or field not in _PATHS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={hydra_value(str(path.relative_to(clone.ROOT) if path.is_relative_to(clone.ROOT) else path))}"


def _quoted(word: str) -> str:
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXTS) or (field.endswith("program.args") and value.startswith("{resume:")):
        return word
    return f"{field}{equals}{_UNQUOTED.sub(lambda found: repr(found[1]) if found[1] else found[0], value)}"
