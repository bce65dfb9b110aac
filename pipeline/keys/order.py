"""The order of names in mappings of a configuration, where that can change a run: digests are taken of sorted ones.

``program.args`` become a command line in the order in which they are told, and what a class of one's own gets may be
built in that of a mapping (``nn.ModuleDict``). Arguments by name go to a function in any order: they are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_NAME = {
    "model": ("args",),
    "optimizer": ("args", "arguments"),
    "dataset": ("args", "augmentation_args"),
    "trainer": ("loss_args",),
}


def order_of(value: Any, path: str) -> dict[str, list[str]]:
    """The names of each mapping in ``value``, by its path, where they aren't sorted. Pure."""
    found: dict[str, list[str]] = {}
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        if names != sorted(names):
            found[path] = names
        for name, inner in value.items():
            found |= order_of(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            found |= order_of(inner, f"{path}[{at}]")
    return found


def order_in(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The same of a whole configuration: of ``program.args``, and of what stands inside the value of a field."""
    found: dict[str, list[str]] = {}
    for section, fields in config.items():
        for field, value in fields.items() if isinstance(fields, Mapping) else ():
            path = f"{section}.{field}"
            if path == "program.args" or not isinstance(value, Mapping):
                found |= order_of(value, path)
            else:
                for name, inner in value.items():
                    found |= order_of(inner, f"{path}.{name}")
    return found


def with_sorted_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the arguments of what is one's own sorted by name: ``**more`` has an order too. Pure."""
    found = dict(config)
    for section, fields in _BY_NAME.items():
        told = found.get(section)
        if isinstance(told, Mapping):
            args = {name: told[name] for name in fields if isinstance(told.get(name), Mapping)}
            found[section] = {**told, **{name: dict(sorted(value.items(), key=_name)) for name, value in args.items()}}
    return found


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])
