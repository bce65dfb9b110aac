"""The folders of this process: Paceline's own code (``HOME``) and the project that it works on (``ROOT``).

A project is either a clone of Paceline, with code and project in one folder, or a folder made by `paceline init`, which
uses the installed code and whose conf/ takes precedence over Paceline's. Commands in other folders are refused.
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
    return next((path for path in (folder, *folder.parents) if is_clone(path) or _is_project(path)), None)


def is_clone(folder: Path) -> bool:
    return (folder / "dodo.py").is_file() and _has_code(folder)


def code_of(root: Path) -> Path:
    """Return the folder of the code that works on the project ``root``."""
    return root if _has_code(root) else HOME


def conf_dirs(root: Path) -> tuple[Path, ...]:
    """Return the configuration folders of the project ``root``, highest precedence first."""
    code = code_of(root)
    in_wheel, of_project = code / "pipeline" / "conf", root / "conf"
    of_paceline = in_wheel if in_wheel.is_dir() else code / "conf"
    return (of_project, of_paceline) if code != root and of_project.is_dir() else (of_paceline,)


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
"""The project of `paceline init` around the working directory; else ``HOME``. Inside a clone of other code it is
``HOME``, too, and ``refuse_other_code`` then refuses the command."""


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
    """Refuse to go on if this process runs other code than that of ``root``, the folder of doit's dodo.py.

    If ``root`` is a clone, pipeline/ and trainers/ must have been imported from it. If it is a project of `paceline
    init`, it must be the one that this process began in. Otherwise results of other code would be stored in ``root``.
    Raises UsageError.
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
    """Return the folder from which the package would be imported; import nothing."""
    if name == __name__.partition(".")[0]:  # pipeline itself is already imported
        return HOME / name
    spec = importlib.util.find_spec(name)
    return Path(os.path.realpath(spec.origin)).parent if spec and spec.origin else None


def refuse_hiding_modules(root: Path) -> None:
    """Refuse modules in ``root`` that would hide one of Python's or Paceline's by their name. Raises UsageError."""
    paceline_modules = frozenset[str]() if code_of(root) == root else MODULES  # a clone has them itself
    for path in root.iterdir():
        if path.stem in sys.stdlib_module_names:
            owner = "Python"
        elif path.stem in paceline_modules:
            owner = "Paceline"
        else:
            continue
        if path.suffix == ".py" or (path / "__init__.py").exists():
            raise UsageError(
                f"{path} has the name of {owner}'s own module {path.stem}, and is imported instead of it",
                hint=f"mv {path.name} my_{path.name}, or any other name that {owner} hasn't",
            )
