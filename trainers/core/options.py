"""Look up the chosen options of a run: option NAME of a group is module NAME of its package, imported on use."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.core import config
from trainers.core.config import GROUPS, ConfigError, DatasetConfig, TrainConfig


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

    Fields that only one data set has are dropped: `doit fetch` checked them and used them for the pack.

    Raises:
        ConfigError: a group names no known option, a field is unknown or a value cannot work.
    """
    section = raw.get("dataset")
    if isinstance(section, Mapping):
        known = {item.name for item in fields(DatasetConfig)}
        raw = {**raw, "dataset": {key: value for key, value in section.items() if key in known}}
    return config.parse(raw, settings)


def load(path: Path) -> TrainConfig:
    """Read ``config.json`` of a run folder. Raises ConfigError or OSError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return parse(raw)


def _unknown(group: str, name: str) -> ConfigError:
    package = importlib.import_module(GROUPS[group].package)
    known = config.option_names(Path(package.__path__[0]), GROUPS[group].base)
    known += sorted(config.installed_options(GROUPS[group].package))
    return ConfigError(f"{group}.name={name!r} is not an option; choose one of: {', '.join(known)}")
