"""Which clone a command works on: that of the dodo.py (or folder) it was started with, and no other."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doit import get_initial_workdir

from pipeline.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
_STARTED_IN = "PACELINE_STARTED_IN"
_PACKAGES = ("pipeline", "trainers")


def started_in() -> Path:
    """The folder where the command was typed: doit leaves it for that of the dodo.py."""
    return Path(os.environ.get(_STARTED_IN) or get_initial_workdir() or os.getcwd())  # noqa: PTH109


def start_elsewhere(folder: Path) -> None:
    """Leave the folder where the command was typed, before the command starts anew in another one."""
    os.environ[_STARTED_IN] = str(started_in())
    os.chdir(folder)


def dodo_file(options: Mapping[str, Any]) -> Path:
    """The file that doit is about to load for its options ``-f``, ``-k`` and DOIT_FILE."""
    here = Path.cwd()
    folders = (here, *here.parents) if options["seek_file"] else (here,)
    places = [folder / str(options["dodoFile"]) for folder in folders]
    return next((place for place in places if place.exists()), places[0])


def enclosing(folder: Path) -> Path | None:
    """The clone that ``folder`` lies in, or None."""
    return next((place for place in (folder, *folder.parents) if _is_clone(place)), None)


def refuse_another(root: Path) -> None:
    """A package of another clone would train that clone's code, into that clone's folders.

    Raises:
        UsageError: ``pipeline`` or ``trainers`` was found elsewhere than in ``root``, the folder of the dodo.py.
    """
    for name in _PACKAGES:
        found = _folder_of(name)
        if found != (root / name).resolve():
            raise UsageError(
                f"this is the clone {root}, but Python takes {name} from {found or 'nowhere'}, which the active "
                "environment or PYTHONPATH puts first",
                hint=f"export PYTHONPATH={shlex.quote(str(root))}, then the same command; or activate this clone's own "
                "environment (make train makes it)",
            )


def _is_clone(folder: Path) -> bool:
    return (folder / "dodo.py").is_file() and all((folder / name / "__init__.py").is_file() for name in _PACKAGES)


def _folder_of(name: str) -> Path | None:
    """Where an import of the package leads; imports nothing."""
    if name == __name__.partition(".")[0]:
        return ROOT / name
    spec = importlib.util.find_spec(name)
    return Path(os.path.realpath(spec.origin)).parent if spec and spec.origin else None
