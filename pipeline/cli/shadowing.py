"""A file of the project that Python takes for a module of its own or of Paceline's: the project comes first on its
path."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.core import places
from pipeline.core.errors import UsageError


def refuse(root: Path) -> None:
    """Whatever imports such a module breaks, in code of doit's or of torch's that nobody has written here.

    Raises:
        UsageError: a module or package in ``root`` has the name of one of the standard library's, or in a project that
            is no clone of Paceline's.
    """
    ours = frozenset[str]() if places.code_of(root) == root else places.MODULES
    for path in root.iterdir():
        whose = "Python" if path.stem in sys.stdlib_module_names else "Paceline" if path.stem in ours else None
        if whose and (path.suffix == ".py" or (path / "__init__.py").exists()):
            raise UsageError(
                f"{path} has the name of {whose}'s own module {path.stem}, and is imported instead of it",
                hint=f"mv {path.name} my_{path.name}, or any other name that {whose} hasn't",
            )
