"""What of a configuration counts in the content key. Pure.

A module of its own: what counts is remembered with a configuration that was composed before, and a finished run then
needs none of the dataclasses that this asks for later fields.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainers.core.config import DatasetConfig, OptimizerConfig, TrainerConfig, later_fields
from trainers.script.settings import ScriptConfig, names

_BY_NAME = {
    "model": ("args",),
    "optimizer": ("args", "arguments"),
    "dataset": ("args", "augmentation_args"),
    "trainer": ("loss_args",),
}


def order_of(value: Any, path: str) -> dict[str, list[str]]:
    """The names of each mapping in ``value``, by its path, where they aren't sorted. Pure."""
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
    """The same of a whole configuration: of ``program.args``, and of what stands inside the value of a field."""
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
    """The configuration with the arguments of what is one's own sorted by name: ``**more`` has an order too. Pure."""
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
    "inputs",
    "data",
    "untracked",
    "ignore_metrics",
    "metrics_pattern",
    "metrics",
    "seal",
    "resume_pattern",
    "outputs_limit",
)
_WHERE = ("cluster", "tracking", "paths")  # where it runs and who is told; the topology part holds the rest
ORDER = "order"
_BEFORE = ("step",)  # what its data was made with, which counts by its digest


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without hosts, ports, tracking, folders and the data's address (its digest counts instead).

    Without fields that came later where they have their defaults (``trainers.core.config.LATER``): a run without
    trainer.shards keeps the key that it had before there were any. Of the weights that a run starts from their digest
    counts, and not what names them. Of a script's section what it reads counts by
    content, in ``code`` and ``data``, and what becomes of its run not at all. Where the order of a mapping can change
    the run it stands beside, unless the names are sorted.
    """
    kept = {name: copy.deepcopy(value) for name, value in config.items() if name not in (*_WHERE, *_BEFORE)}
    if isinstance(kept.get("dataset"), dict):
        kept["dataset"].pop("source", None)
    for group, added in _LATER.items():
        section = kept.get(group)
        if isinstance(section, dict):
            at_default = [name for name, default in added.items() if section.get(name, default) == default]
            kept[group] = {name: value for name, value in section.items() if name not in at_default}
    if isinstance(kept.get("model"), dict):
        kept["model"].pop("inputs", None)  # they count by content
    trainer = kept.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("freeze"), list):
        trainer["freeze"] = sorted(set(trainer["freeze"]))  # which of them matches first is nothing to the run
    if (init := _of_initial_weights(kept.pop("init", None))) is not None:
        kept["init"] = init
    if isinstance(kept.get("program"), dict):
        if not names_seed(kept["program"]):  # it never sees it
            kept.pop("seed", None)
        kept["program"] = _of_script(kept["program"])
    if order := order_in(kept):
        kept[ORDER] = order
    return kept


def names_seed(script: Mapping[str, Any]) -> bool:
    """Whether a script is given the seed: one of its arguments or variables has {seed}."""
    return "seed" in names(json.dumps([script.get("args"), script.get("env")]))


def _of_initial_weights(section: Any) -> dict[str, Any] | None:
    """Their digest, what names them where that isn't known yet, None where they are fresh."""
    given = {name: value for name, value in (section or {}).items() if value is not None}
    if not given.keys() & {"weights", "run"}:
        return None
    return {"sha256": given["sha256"]} if "sha256" in given else given


def _of_script(section: Mapping[str, Any]) -> dict[str, Any]:
    """Of a script that lies elsewhere its name counts, and not its folder."""
    script = str(section.get("script") or "")
    kept = {name: value for name, value in section.items() if name not in _NOT_OF_A_SCRIPT}
    if "args" in kept:
        kept["args"] = _same_words(kept["args"]) or None  # none at all, however they were given
    return {**kept, "script": script.rpartition("/")[2] if script.startswith("/") else script}


def _same_words(args: Any) -> Any:
    """``program.args`` in the one form that all values have which come to the same command line: 0.1 for '0.1', and
    without those that are left out of it (false, null)."""
    if isinstance(args, Mapping):
        used = {name: value for name, value in args.items() if value is not None and value is not False}
        return {name: _same_word(value, is_option=True) for name, value in used.items()}
    return [_same_word(value) for value in args] if isinstance(args, list) else args


def _same_word(value: Any, *, is_option: bool = False) -> Any:
    """``is_option``: true is --name there, and 'true' its value."""
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
