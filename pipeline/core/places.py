"""Where Paceline's own code lies, and which project this process works on: a clone, or one made by `paceline init`.

A project of `paceline init` uses the installed code, and its conf/ takes precedence over Paceline's.
"""

from __future__ import annotations

from pathlib import Path

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
