"""The chosen options of a run: option NAME of a group is the module NAME of the group's package, imported on use."""

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
    """The module of an option. Raises ConfigError where there is none of that name."""
    target = f"{GROUPS[group].package}.{name}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name != target:  # a module that the option itself imports
            raise
    installed = config.installed_options(GROUPS[group].package)
    if name not in installed:
        raise _unknown(group, name)
    return importlib.import_module(installed[name])


def settings(group: str, name: str) -> type[Any]:
    """The class of an option's settings; of a data set's, what all of them have. Raises ConfigError."""
    if group == "dataset":
        return DatasetConfig
    option, base = module(group, name), GROUPS[group].base
    for value in vars(option).values():
        if isinstance(value, type) and base in value.__bases__ and value.__module__ == option.__name__:
            return value
    raise _unknown(group, name)


def parse(raw: Mapping[str, Any]) -> TrainConfig:
    """Type a resolved configuration with the settings of its options.

    What else a data set was told went into its pack, and was checked then.

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
