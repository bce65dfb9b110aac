"""Classes and functions of one's own, named as ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.core.config import ConfigError

_ROOT = Path(__file__).parents[2]  # on a node the snapshot of the code


def load(target: str) -> Callable[..., Any]:
    """Import what a target names. Raises ConfigError: the module hasn't such a name, or it can't be called."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if found is None or not callable(found):
        raise ConfigError(f"{target}: {module} has no class or function {name}")
    return found


def asked(found: Callable[..., Any], args: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """``args``, and those of ``offered`` that its signature has a name for."""
    known = inspect.signature(found).parameters
    return {**{name: value for name, value in offered.items() if name in known}, **args}


def place(target: str) -> str:
    """``my_package/parts.py:12 MyName``, for messages."""
    try:
        found = inspect.unwrap(load(target))
        path = Path(inspect.getsourcefile(found) or "")
        line = inspect.getsourcelines(found)[1]
    except (OSError, TypeError):  # it has no source
        return target
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"{shown}:{line} {target.partition(':')[2]}"
