"""Where Paceline's own files lie, and the project that this process works on.

A clone is a project of its own. A project that `paceline init` made has no code of Paceline's: it takes that of the
environment, and its conf/ goes before Paceline's.
"""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""The folder that ``pipeline`` and ``trainers`` lie in: a clone, or where packages are installed."""

PACKAGES = ("pipeline", "trainers")
MODULES = frozenset({*PACKAGES, "paceline"})
"""Paceline's own top-level modules, whose sources count in keys wherever they lie."""

IS_INSTALLED = (HOME / "pipeline" / "conf").is_dir()  # where a wheel has conf/
_MARK = "pipeline.cli.project"  # what the dodo.py of a project imports


def enclosing(folder: Path) -> Path | None:
    """The clone or project that ``folder`` lies in, or None."""
    return next((place for place in (folder, *folder.parents) if is_clone(place) or _is_project(place)), None)


def is_clone(folder: Path) -> bool:
    return (folder / "dodo.py").is_file() and _has_code(folder)


def code_of(root: Path) -> Path:
    """Where the code lies that works on the project ``root``."""
    return root if _has_code(root) else HOME


def conf_dirs(root: Path) -> tuple[Path, ...]:
    """The folders of configurations of the project ``root``: of two files of one name the first folder's counts."""
    code = code_of(root)
    packed, own = code / "pipeline" / "conf", root / "conf"
    ours = packed if packed.is_dir() else code / "conf"
    return (own, ours) if code != root and own.is_dir() else (ours,)


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
"""The project: the one that the process was started in, else the clone that this code is of."""
