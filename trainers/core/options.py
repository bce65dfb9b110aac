"""The importer of what a configuration names: option NAME of a group is module NAME of the group's package (or of an
installed distribution), and a class or function of the user's own is ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.core import config
from trainers.core.config import GROUPS, ConfigError, DatasetConfig, TrainConfig

_ROOT = Path(__file__).parents[2]  # on a node: the run's code snapshot


def module(group: str, name: str) -> ModuleType:
    """Import and return the module of an option. Raises ConfigError if no option has that name."""
    target = f"{GROUPS[group].package}.{name}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name != target:  # the option exists; one of its own imports is missing
            raise
    installed = config.installed_options(GROUPS[group].package)
    if name not in installed:
        raise _unknown(group, name)
    return importlib.import_module(installed[name])


def settings(group: str, name: str) -> type[Any]:
    """Return an option's settings class; for a data set, the base class of all data sets. Raises ConfigError."""
    if group == "dataset":
        return DatasetConfig
    option, base = module(group, name), GROUPS[group].base
    for value in vars(option).values():
        if isinstance(value, type) and base in value.__bases__ and value.__module__ == option.__name__:
            return value
    raise _unknown(group, name)


def parse(raw: Mapping[str, Any]) -> TrainConfig:
    """Type a resolved configuration with the settings classes of its options.

    Fields that only one data set has are dropped: `doit fetch` used them for the pack. Raises ConfigError.
    """
    section = raw.get("dataset")
    if isinstance(section, Mapping):
        shared = {item.name for item in fields(DatasetConfig)}
        raw = {**raw, "dataset": {key: value for key, value in section.items() if key in shared}}
    return config.parse(raw, settings)


def load(path: Path) -> TrainConfig:
    """Read ``config.json`` of a run folder. Raises ConfigError, OSError, ValueError."""
    return parse(json.loads(path.read_text(encoding="utf-8")))


def _unknown(group: str, name: str) -> ConfigError:
    package = importlib.import_module(GROUPS[group].package)
    names = config.option_names(Path(package.__path__[0]), GROUPS[group].base)
    names += sorted(config.installed_options(GROUPS[group].package))
    return ConfigError(f"{group}.name={name!r} is not an option; choose one of: {', '.join(names)}")


# User-defined classes and functions, named as ``package.module:name``.


def load_target(target: str) -> Callable[..., Any]:
    """Import the class or function that a target names. Raises ConfigError: it is missing or not callable."""
    module, _, name = target.partition(":")
    loaded: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if loaded is None or not callable(loaded):
        raise ConfigError(f"{target}: {module} has no class or function {name}")
    return loaded


def accepted(function: Callable[..., Any], args: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``args`` plus those keyword arguments of ``offered`` that the function accepts."""
    parameters = inspect.signature(function).parameters
    return {**{name: value for name, value in offered.items() if name in parameters}, **args}


def where(target: str) -> str:
    """Return where a target is defined, such as ``my_package/parts.py:12 MyName``, for messages."""
    try:
        loaded = inspect.unwrap(load_target(target))
        path = Path(inspect.getsourcefile(loaded) or "")
        line = inspect.getsourcelines(loaded)[1]
    except (OSError, TypeError):  # a builtin or compiled object has no source
        return target
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"{shown}:{line} {target.partition(':')[2]}"
