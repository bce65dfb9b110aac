"""Reduce a resolved configuration to the fields that count in the content key. Pure.

A separate module, because the result is cached together with a composed configuration: checking a finished run then
needs none of the settings dataclasses that ``later_fields`` imports.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline.keys.content_key import ORDER
from trainers.core.config import DatasetConfig, OptimizerConfig, TrainerConfig, later_fields
from trainers.script.settings import ScriptConfig, names

_BY_NAME = {
    "model": ("args",),
    "optimizer": ("args", "arguments"),
    "dataset": ("args", "augmentation_args"),
    "trainer": ("loss_args",),
}


def order_of(value: Any, path: str) -> dict[str, list[str]]:
    """Return the field order of each mapping in ``value`` that isn't sorted, by dotted path. Pure."""
    orders: dict[str, list[str]] = {}
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        if names != sorted(names):
            orders[path] = names
        for name, inner in value.items():
            orders |= order_of(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            orders |= order_of(inner, f"{path}[{at}]")
    return orders


def order_in(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Apply ``order_of`` to a whole configuration: to ``program.args`` and to mappings inside field values."""
    orders: dict[str, list[str]] = {}
    for section, fields in config.items():
        for field, value in fields.items() if isinstance(fields, Mapping) else ():
            path = f"{section}.{field}"
            if path == "program.args" or not isinstance(value, Mapping):
                orders |= order_of(value, path)
            else:
                for name, inner in value.items():
                    orders |= order_of(inner, f"{path}.{name}")
    return orders


def with_sorted_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the arguments of user-defined components by name, because ``**kwargs`` also has an order. Pure."""
    ordered = dict(config)
    for section, fields in _BY_NAME.items():
        settings = ordered.get(section)
        if isinstance(settings, Mapping):
            args = {name: settings[name] for name in fields if isinstance(settings.get(name), Mapping)}
            ordered[section] = {
                **settings,
                **{name: dict(sorted(value.items(), key=lambda item: str(item[0]))) for name, value in args.items()},
            }
    return ordered


_LATER = {
    "dataset": later_fields(DatasetConfig),
    "trainer": later_fields(TrainerConfig),
    "optimizer": later_fields(OptimizerConfig),
    "program": later_fields(ScriptConfig),
}
_NOT_OF_A_SCRIPT = (
    *("inputs", "data", "untracked", "outputs_limit"),
    *("ignore_metrics", "metrics_pattern", "metrics", "seal", "resume_pattern"),
)
_WHERE = ("cluster", "tracking", "paths")  # where a run executes and reports; the topology part covers the rest
_BEFORE = ("step",)  # the preparation step of the data, which counts by the data's digest


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without hosts, ports, tracking, folders and the data's address.

    - Fields added in later versions (``trainers.core.fields.KEYED_UNLESS_DEFAULT``) are dropped at their defaults, so
      that older runs keep their keys: a run without trainer.shards has the key from before that field existed.
    - Initial weights count by their digest, not by the path or run that names them.
    - Files that a script reads count by content, in the ``code`` and ``data`` parts; what happens to the run's outputs
      doesn't count at all.
    - The order of a mapping is recorded under ``order`` where it can change the run, unless its names are sorted.
    """
    kept = {name: copy.deepcopy(value) for name, value in config.items() if name not in (*_WHERE, *_BEFORE)}
    if isinstance(kept.get("dataset"), dict):
        kept["dataset"].pop("source", None)
    for group, added in _LATER.items():
        section = kept.get(group)
        if isinstance(section, dict):
            # A field that came later keeps old keys valid: at its default it is left out.
            at_default = [name for name, default in added.items() if section.get(name, default) == default]
            kept[group] = {name: value for name, value in section.items() if name not in at_default}
    if isinstance(kept.get("model"), dict):
        kept["model"].pop("inputs", None)  # these files count by content
    trainer = kept.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("freeze"), list):
        trainer["freeze"] = sorted(set(trainer["freeze"]))  # the order of the patterns doesn't affect the run
    if (init := _initial_weights(kept.pop("init", None))) is not None:
        kept["init"] = init
    if isinstance(kept.get("program"), dict):
        if not names_seed(kept["program"]):  # the script never receives the seed
            kept.pop("seed", None)
        kept["program"] = _script_fields(kept["program"])
    if order := order_in(kept):
        kept[ORDER] = order
    return kept


def names_seed(script: Mapping[str, Any]) -> bool:
    """Return True if a script receives the seed: an argument or variable contains {seed}."""
    return "seed" in names(json.dumps([script.get("args"), script.get("env")]))


def _initial_weights(section: Any) -> dict[str, Any] | None:
    """Return the weights' digest if known, else the fields that name them; None for a fresh initialization."""
    given = {name: value for name, value in (section or {}).items() if value is not None}
    if not given.keys() & {"weights", "run"}:
        return None
    return {"sha256": given["sha256"]} if "sha256" in given else given


def _script_fields(section: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the fields of a script that don't count; a script outside the project counts by its file name alone."""
    script = str(section.get("script") or "")
    kept = {name: value for name, value in section.items() if name not in _NOT_OF_A_SCRIPT}
    if "args" in kept:
        kept["args"] = _same_words(kept["args"]) or None  # [] and {} count as no arguments
    return {**kept, "script": script.rpartition("/")[2] if script.startswith("/") else script}


def _same_words(args: Any) -> Any:
    """Normalize ``program.args``: all values that yield the same command line get one form.

    '0.1' becomes 0.1, and options that the command line omits (false, null) are dropped.
    """
    if isinstance(args, Mapping):
        used = {name: value for name, value in args.items() if value is not None and value is not False}
        return {name: _same_word(value, is_option=True) for name, value in used.items()}
    return [_same_word(value) for value in args] if isinstance(args, list) else args


def _same_word(value: Any, *, is_option: bool = False) -> Any:
    """Normalize one argument. With ``is_option``, true means the bare option --name, so the text 'true' stays."""
    if isinstance(value, list):
        return [_same_word(item) for item in value]
    if not isinstance(value, str):
        return value
    if value in ("true", "false") and not is_option:
        return value == "true"
    for number in (int, float):
        with suppress(ValueError):
            if str(read := number(value)) == value and math.isfinite(read):
                return read
    return value
