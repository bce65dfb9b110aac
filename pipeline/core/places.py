"""Where Paceline's own code lies, and which project this process works on: a clone, or one made by `paceline init`.

A project of `paceline init` uses the installed code, and its conf/ takes precedence over Paceline's. Commands in other
folders are refused.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from pipeline.core.errors import UsageError

HOME = Path(__file__).resolve().parents[2]
"""The folder that contains ``pipeline`` and ``trainers``: a clone, or site-packages."""

PACKAGES = ("pipeline", "trainers")
MODULES = frozenset({*PACKAGES, "paceline", "paceline_huggingface", "paceline_lightning"})
"""Paceline's own top-level modules, whose sources count in keys wherever they are installed."""

IS_INSTALLED = (HOME / "pipeline" / "conf").is_dir()  # only a wheel has conf/ there
_MARK = "pipeline.cli.project"  # the module that a project's dodo.py imports
REPRODUCTIONS = ".reproduced"
"""The folder beside the runs for runs that are made again, and for the verdicts about them."""


def enclosing(folder: Path) -> Path | None:
    """Return the clone or project that contains ``folder``, or None."""
    return next((place for place in (folder, *folder.parents) if is_clone(place) or _is_project(place)), None)


def is_clone(folder: Path) -> bool:
    return (folder / "dodo.py").is_file() and _has_code(folder)


def code_of(root: Path) -> Path:
    """Return the folder of the code that works on the project ``root``."""
    return root if _has_code(root) else HOME


def conf_dirs(root: Path) -> tuple[Path, ...]:
    """Return the configuration folders of the project ``root``, highest precedence first."""
    code = code_of(root)
    packed, own = code / "pipeline" / "conf", root / "conf"
    ours = packed if packed.is_dir() else code / "conf"
    return (own, ours) if code != root and own.is_dir() else (ours,)


def shown(path: Path, root: Path) -> str:
    """Return a path for messages: relative to ``root`` if it lies below it."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _is_project(folder: Path) -> bool:
    try:
        return _MARK in (folder / "dodo.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _has_code(folder: Path) -> bool:
    return all((folder / name / "__init__.py").is_file() for name in PACKAGES)


def _root() -> Path:
    try:
        project = enclosing(Path.cwd())
    except FileNotFoundError:  # the working directory was removed
        return HOME
    return HOME if project is None or is_clone(project) else project


ROOT = _root()
"""The project: the one around the working directory, else the clone of this code."""


# ------------------------------------------------------------------------------- refusals of other folders
INIT = "paceline init my_project, then cd my_project; where your script is already: paceline init ."


def no_project() -> UsageError:
    """Return the error of a command outside of every project."""
    return UsageError(f"no project here: neither {Path.cwd()} nor a folder above has one", hint=INIT)


def refuse_outside() -> None:
    """Refuse to start outside of a project if Paceline is installed. Raises UsageError."""
    if IS_INSTALLED and enclosing(Path.cwd()) is None:
        raise no_project()


def refuse_other_code(root: Path) -> None:
    """Refuse to go on if this process runs other code than that of ``root``, the folder of the dodo.py.

    In a clone, pipeline/ and trainers/ must come from it; a project of its own must be the one that Python was started
    for. Otherwise another clone's code would be trained into that clone's folders. Raises UsageError.
    """
    if not is_clone(root):
        if root != ROOT.resolve():
            hint = f"cd {shlex.quote(str(root))}, then the same command without -f"
            raise UsageError(f"{root} is another project than {ROOT}", hint=hint)
        return
    for name in PACKAGES:
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
        return HOME / name
    spec = importlib.util.find_spec(name)
    return Path(os.path.realpath(spec.origin)).parent if spec and spec.origin else None


def refuse_hiding_modules(root: Path) -> None:
    """Refuse modules in ``root`` that would hide one of Python's or Paceline's by their name. Raises UsageError."""
    ours = frozenset[str]() if code_of(root) == root else MODULES
    for path in root.iterdir():
        whose = "Python" if path.stem in sys.stdlib_module_names else "Paceline" if path.stem in ours else None
        if whose and (path.suffix == ".py" or (path / "__init__.py").exists()):
            raise UsageError(
                f"{path} has the name of {whose}'s own module {path.stem}, and is imported instead of it",
                hint=f"mv {path.name} my_{path.name}, or any other name that {whose} hasn't",
            )
