"""Hydra's compositions, made of ones that were made before: it takes two tenths of a second for each.

Which options the words choose decides what is loaded and merged. That is composed once a process for each choice; the
fields among the words are then put into a copy by Hydra's own code, as it does itself at the end of each composition.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig

from pipeline.config import compose

_chosen: dict[tuple[object, ...], DictConfig] = {}


def quickly(name: str, overrides: Sequence[str] = (), return_hydra_config: bool = False) -> DictConfig:
    """``hydra.compose``, for ``pipeline.config.compose.compose``. What it refuses is refused by Hydra itself.

    Not for tests of what Hydra is given, nor of options that come and go.
    """
    if not return_hydra_config:
        with suppress(Exception):  # of many types
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            if not any(_needs_hydra(override) for override in parsed):
                return _put_together(name, parsed)
    return hydra.compose(name, overrides=list(overrides), return_hydra_config=return_hydra_config)


def _put_together(name: str, parsed: Sequence[Override]) -> DictConfig:
    chosen = [override for override in parsed if _chooses(override)]
    if all(override.type is OverrideType.CHANGE for override in chosen):
        chosen = [*{override.get_key_element(): override for override in chosen}.values()]  # the last word counts
        chosen.sort(key=lambda override: str(override.get_key_element()))
    config = copy.deepcopy(_composed(name, [str(override.input_line) for override in chosen]))
    ConfigLoaderImpl._apply_overrides_to_config([item for item in parsed if not _chooses(item)], config)
    return config


def _composed(name: str, words: list[str]) -> DictConfig:
    key = (name, *words, *map(str, compose.CONF_DIRS), *_times())
    if key not in _chosen:
        _chosen[key] = hydra.compose(name, overrides=words)
    return _chosen[key]


def _times() -> Iterator[tuple[str, int]]:
    for folder, _, names in (found for top in compose.CONF_DIRS for found in os.walk(top)):
        yield from ((name, os.stat(f"{folder}/{name}").st_mtime_ns) for name in names)  # noqa: PTH116


def _chooses(override: Override) -> bool:
    """An option of a group, as Hydra tells it from the value of a field."""
    is_group = any((top / override.key_or_group).is_dir() for top in compose.CONF_DIRS)
    return is_group and not isinstance(override.value(), dict)


def _needs_hydra(override: Override) -> bool:
    return bool(override.is_sweep_override()) or override.key_or_group.partition(".")[0] == "hydra"
