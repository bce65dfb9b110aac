"""The origin of each value of a composed configuration, for `doit config`.

An origin is a file of conf/, the user's own defaults, the command line, or the default of a settings class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipeline.config import compose, conf_files
from pipeline.config.conf_files import choice_of
from pipeline.config.overrides.trials import parsed_words
from pipeline.config.overrides.words import for_hydra
from pipeline.core.places import ROOT, shown
from pipeline.core.redact import without_secrets

COMMAND_LINE = "command line"
_COLUMN = 44  # where comments begin in the YAML, unless the value is longer


class Value(NamedTuple):
    """A field of the configuration: its keys from the outermost to its own, its value and its origin."""

    keys: tuple[str, ...]
    value: Any
    origin: str


def values(words: Sequence[str]) -> list[Value]:
    """Return all fields of the configuration composed from ``words``, with secrets masked. Raises UsageError."""
    with compose.hydra_ready():
        config = compose.compose_now(words)
        origins = _origins(words)
        resolved = without_secrets(compose.resolve(config))
    return [Value(keys, value, origins.get(keys) or _default(config, keys)) for keys, value in _leaves(resolved)]


def identifying_fields(group: str, words: Sequence[str]) -> list[str]:
    """Return the fields by which runs with the option that ``words`` choose in ``group`` are recognised.

    If the option's file sets its own name (``name: resnet18`` in model/resnet18.yaml), this is ``model.name`` alone.
    For other files (``trainer=fast``) it is every field that the file sets.
    """
    fields_set: dict[str, None] = {}
    with compose.hydra_ready():
        for item, _, content in _files(for_hydra(words)):
            package = item.package or ""
            if package.partition(".")[0] != group:
                continue
            if content.get(name := choice_of(group)) == str(item.config_path).rpartition("/")[2]:
                fields_set[f"{group}.{name}"] = None
            else:
                leaves = (".".join((package, *keys)) for keys, _ in _leaves(content) if keys[0] != "defaults")
                fields_set |= dict.fromkeys(leaves)
    return list(fields_set)


def as_yaml(fields: Sequence[Value]) -> str:
    """Return YAML with the origin of each value as a comment."""
    lines: list[str] = []
    parents: tuple[str, ...] = ()
    for keys, value, origin in fields:
        # the headings of the sections that begin with this field
        for depth in range(len(keys) - 1):
            if keys[: depth + 1] != parents[: depth + 1]:
                lines.append(f"{'  ' * depth}{keys[depth]}:")
        parents = keys[:-1]
        shown: str = yaml.safe_dump({keys[-1]: value}, default_flow_style=True, width=10_000, allow_unicode=True)
        line = "  " * len(parents) + shown.strip()[1:-1]  # without the braces
        lines.append(f"{line.ljust(_COLUMN)}  # {origin}")
    return "\n".join(lines)


def _origins(words: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Return keys → origin for each field that a file or the command line sets; the last one that Hydra merges wins."""
    origins: dict[tuple[str, ...], str] = {}
    for item, origin, content in _files(words):
        package = tuple(filter(None, (item.package or "").split(".")))
        for keys, _ in _leaves(content):
            if keys and keys[0] != "defaults":
                origins[(*package, *keys)] = origin
    for override in parsed_words(words):
        keys = tuple(override.key_or_group.split("."))
        group = override.key_or_group.partition("@")[0]
        # a word that chooses an option sets no field itself: the option's file does
        if not any((folder / group).is_dir() for folder in compose.CONF_DIRS):
            origins[keys] = COMMAND_LINE
            if isinstance(override.value(), Mapping):
                origins |= dict.fromkeys(((*keys, *inner) for inner, _ in _leaves(override.value())), COMMAND_LINE)
    return origins


def _files(words: Sequence[str]) -> Iterator[tuple[ResultDefault, str, dict[Any, Any]]]:
    """Yield (Hydra's entry, origin, content) of each file that Hydra merges, in its order."""
    loader, own = GlobalHydra.instance().config_loader(), conf_files.own_files()
    for item in loader.compute_defaults_list(compose.CONFIG_NAME, list(words), RunMode.RUN).defaults:
        name = f"{item.config_path}.yaml"
        folder = next((folder for folder in compose.CONF_DIRS if (folder / name).is_file()), None)
        if (path := own.get(str(item.config_path))) is not None:
            origin = shown(path, ROOT)
        elif folder is not None:
            # outside of a clone of Paceline, a project has a conf/ besides Paceline's
            conf = "conf" if folder == compose.CONF_DIRS[0] else "Paceline's conf"
            path, origin = folder / name, f"{conf}/{name}"
        else:  # a schema, or Hydra's own file
            continue
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(content, dict)  # Hydra accepts no list here
        yield item, origin, content


def _default(config: DictConfig, keys: tuple[str, ...]) -> str:
    """Name the settings class that gave the default: that of the nearest section above the field."""
    for depth in range(len(keys) - 1, -1, -1):
        node = OmegaConf.select(config, ".".join(keys[:depth])) if depth else config
        kind = OmegaConf.get_type(node)
        if kind is not None and kind is not dict:
            return f"default of {kind.__name__}"
    return "default"


def _leaves(value: Any, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield pairs (keys, value); an empty mapping and a list are values too."""
    if isinstance(value, Mapping) and (value or not parents):
        for key, inner in value.items():
            yield from _leaves(inner, (*parents, str(key)))
    else:
        yield parents, value
