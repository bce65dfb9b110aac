"""Load user-defined classes and functions, named as ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.core.config import ConfigError

_ROOT = Path(__file__).parents[2]  # on a node: the run's code snapshot


def load(target: str) -> Callable[..., Any]:
    """Import the class or function that a target names. Raises ConfigError: it is missing or not callable."""
    module, _, name = target.partition(":")
    loaded: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if loaded is None or not callable(loaded):
        raise ConfigError(f"{target}: {module} has no class or function {name}")
    return loaded


def accepted(function: Callable[..., Any], args: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``args`` plus those keyword arguments of ``offered`` that the function accepts."""
    known = inspect.signature(function).parameters
    return {**{name: value for name, value in offered.items() if name in known}, **args}


def place(target: str) -> str:
    """Return ``my_package/parts.py:12 MyName`` for use in messages."""
    try:
        loaded = inspect.unwrap(load(target))
        path = Path(inspect.getsourcefile(loaded) or "")
        line = inspect.getsourcelines(loaded)[1]
    except (OSError, TypeError):  # a builtin or compiled object has no source
        return target
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"{shown}:{line} {target.partition(':')[2]}"
