"""Modules of a package without what the package's ``__init__`` imports beside them, until that is needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def defer_init(name: str) -> None:
    """Run the ``__init__`` of the top-level package ``name`` only when something is asked that it alone defines.

    Its modules are imported as ever, and nothing is missing: a name that is no module of the package runs its
    ``__init__`` first. A package that is imported already, or not installed, is left to the import statement.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def missing(attribute: str) -> Any:
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        vars(package).pop("__getattr__", None)  # another thread may be as far
        loader.exec_module(package)
        return getattr(package, attribute)

    vars(package)["__getattr__"] = missing  # PEP 562
    sys.modules[name] = package
