"""Which folder a command was typed in, which project it works on, and refusals of any other."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doit import get_initial_workdir

from pipeline.core import places
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT

INIT = "paceline init my_project, then cd my_project; where your script is already: paceline init ."
STARTED_IN = "PACELINE_STARTED_IN"
"""The variable in which a command that is started anew finds the folder where it was typed."""

_remembered: list[str] = []


def typed_in() -> Path:
    """Return the folder where the command was typed, which doit leaves for that of the dodo.py."""
    folders = [os.environ.get(STARTED_IN), *_remembered, get_initial_workdir()]
    return Path(next(filter(None, folders), None) or os.getcwd())  # noqa: PTH109


def remember_typed_in() -> None:
    """Remember that the command was typed in this folder, before it is left for the project's."""
    _remembered[:] = [os.getcwd()]  # noqa: PTH109


def leave_for(folder: Path) -> None:
    """Go to another folder, in which the command is restarted; its variable keeps the one where it was typed."""
    os.environ[STARTED_IN] = str(typed_in())
    os.chdir(folder)


def dodo_file(options: Mapping[str, Any]) -> Path:
    """Return the file that doit is about to load by its options ``-f``, ``-k`` and DOIT_FILE."""
    here = Path.cwd()
    folders = (here, *here.parents) if options["seek_file"] else (here,)
    named = [folder / str(options["dodoFile"]) for folder in folders]
    return next((path for path in named if path.exists()), named[0])


def no_project() -> UsageError:
    """Return the error of a command outside of every project."""
    return UsageError(f"no project here: neither {Path.cwd()} nor a folder above has one", hint=INIT)


def refuse_outside() -> None:
    """Refuse to start outside of a project if Paceline is installed. Raises UsageError."""
    if places.IS_INSTALLED and places.enclosing(Path.cwd()) is None:
        raise no_project()


def refuse_other_code(root: Path) -> None:
    """Refuse to go on if this process runs other code than that of ``root``, the folder of the dodo.py.

    In a clone, pipeline/ and trainers/ must come from it; a project of its own must be the one that Python was started
    for. Otherwise another clone's code would be trained into that clone's folders. Raises UsageError.
    """
    if not places.is_clone(root):
        if root != ROOT.resolve():
            hint = f"cd {shlex.quote(str(root))}, then the same command without -f"
            raise UsageError(f"{root} is another project than {ROOT}", hint=hint)
        return
    for name in places.PACKAGES:
        folder = _folder_of(name)
        if folder != (root / name).resolve():
            raise UsageError(
                f"this is the clone {root}, but Python takes {name} from {folder or 'nowhere'}, which the active "
                "environment or PYTHONPATH puts first",
                hint=f"export PYTHONPATH={shlex.quote(str(root))}, then the same command; or activate this clone's own "
                "environment (make install makes it)",
            )


def _folder_of(name: str) -> Path | None:
    """Return the place that an import of the package would load; imports nothing."""
    if name == __name__.partition(".")[0]:
        return places.HOME / name
    spec = importlib.util.find_spec(name)
    return Path(os.path.realpath(spec.origin)).parent if spec and spec.origin else None


def refuse_hiding_modules(root: Path) -> None:
    """Refuse modules in ``root`` that would hide one of Python's or Paceline's by their name. Raises UsageError."""
    ours = frozenset[str]() if places.code_of(root) == root else places.MODULES
    for path in root.iterdir():
        whose = "Python" if path.stem in sys.stdlib_module_names else "Paceline" if path.stem in ours else None
        if whose and (path.suffix == ".py" or (path / "__init__.py").exists()):
            raise UsageError(
                f"{path} has the name of {whose}'s own module {path.stem}, and is imported instead of it",
                hint=f"mv {path.name} my_{path.name}, or any other name that {whose} hasn't",
            )
