"""Where each value of a composed configuration comes from: a file of conf/, a person's own defaults, the command line,
a schema's default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipeline.config import compose, own_defaults
from pipeline.config.groups import choice_of
from pipeline.config.overrides.trials import overrides
from pipeline.config.overrides.words import for_hydra
from pipeline.core.redact import without_secrets

COMMAND_LINE = "command line"
_COLUMN = 44  # of the comments; a longer value moves its own


class Value(NamedTuple):
    """One field of the configuration: its keys from the outside in, what it is, and where from."""

    keys: tuple[str, ...]
    value: Any
    origin: str


def values(words: Sequence[str]) -> list[Value]:
    """Every field that these overrides are composed to, interpolations resolved and secrets masked.

    Raises:
        UsageError: what composing refuses.
    """
    with compose.hydra_ready():
        config = compose.compose_now(words)
        origins = _origins(words)
        resolved = without_secrets(compose.resolve(config))
    return [Value(keys, value, origins.get(keys) or _default(config, keys)) for keys, value in _leaves(resolved)]


def stands_for(group: str, words: Sequence[str]) -> list[str]:
    """The fields by which a run tells that it has the option that these words choose: ``model.name`` where the option
    is known by that name, whatever its other fields are; of a file of another name (``trainer=fast``) all that it sets.
    """
    with compose.hydra_ready():
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(compose.CONFIG_NAME, for_hydra(words), RunMode.RUN).defaults
    fields_set: dict[str, None] = {}
    for item in merged:
        package, folder = item.package or "", _folder_of(f"{item.config_path}.yaml")
        if package.partition(".")[0] != group or folder is None:  # None: a schema
            continue
        content = OmegaConf.to_container(OmegaConf.load(folder / f"{item.config_path}.yaml"))
        assert isinstance(content, dict)  # Hydra takes no other
        name = choice_of(group)
        if content.get(name) == item.config_path.rpartition("/")[2]:
            fields_set[f"{group}.{name}"] = None
        else:
            leaves = (".".join((package, *keys)) for keys, _ in _leaves(content) if keys[0] != "defaults")
            fields_set |= dict.fromkeys(leaves)
    return list(fields_set)


def text(fields: Sequence[Value]) -> str:
    """YAML with the origin of each value as a comment."""
    lines: list[str] = []
    above: tuple[str, ...] = ()
    for keys, value, origin in fields:
        for depth in range(len(keys) - 1):
            if keys[: depth + 1] != above[: depth + 1]:
                lines.append(f"{'  ' * depth}{keys[depth]}:")
        above = keys[:-1]
        lines.append(f"{_line(keys, value).ljust(_COLUMN)}  # {origin}")
    return "\n".join(lines)


def _line(keys: tuple[str, ...], value: Any) -> str:
    shown: str = yaml.safe_dump({keys[-1]: value}, default_flow_style=True, width=10_000, allow_unicode=True)
    return "  " * (len(keys) - 1) + shown.strip()[1:-1]  # without the braces


def _origins(words: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Of what a file or the command line has set: whoever comes last in Hydra's order of merging."""
    loader = GlobalHydra.instance().config_loader()
    merged = loader.compute_defaults_list(compose.CONFIG_NAME, list(words), RunMode.RUN).defaults
    origins: dict[tuple[str, ...], str] = {}
    for item in merged:
        path, called = _file_of(item.config_path)
        if path is not None:  # else a schema, or Hydra's own
            package = tuple(filter(None, (item.package or "").split(".")))
            for keys, _ in _leaves(OmegaConf.to_container(OmegaConf.load(path))):
                if keys and keys[0] != "defaults":
                    origins[(*package, *keys)] = called
    for override in overrides(words):
        keys = tuple(override.key_or_group.split("."))
        if not _is_group(override.key_or_group):
            origins[keys] = COMMAND_LINE
            if isinstance(override.value(), Mapping):
                origins |= dict.fromkeys(((*keys, *inner) for inner, _ in _leaves(override.value())), COMMAND_LINE)
    return origins


def _file_of(config_path: str) -> tuple[Path | None, str]:
    """The file behind what Hydra merges, and how it is named to a person."""
    if (own := own_defaults.files().get(config_path)) is not None:
        return own, own_defaults.called(own)
    folder = _folder_of(f"{config_path}.yaml")
    if folder is None:
        return None, ""
    return folder / f"{config_path}.yaml", f"{_called(folder)}/{config_path}.yaml"


def _folder_of(name: str) -> Path | None:
    return next((folder for folder in compose.CONF_DIRS if (folder / name).is_file()), None)


def _called(folder: Path) -> str:
    """The project's own folder, and in a project that is no clone Paceline's."""
    return "conf" if folder == compose.CONF_DIRS[0] else "Paceline's conf"


def _is_group(key: str) -> bool:
    return any((folder / key.partition("@")[0]).is_dir() for folder in compose.CONF_DIRS)


def _default(config: DictConfig, keys: tuple[str, ...]) -> str:
    """The nearest mapping above that has a schema gave the value."""
    for depth in range(len(keys) - 1, -1, -1):
        node = OmegaConf.select(config, ".".join(keys[:depth])) if depth else config
        kind = OmegaConf.get_type(node)
        if kind is not None and kind is not dict:
            return f"default of {kind.__name__}"
    return "default"


def _leaves(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What is no mapping (or an empty one), with its keys."""
    if isinstance(value, Mapping) and (value or not above):
        for key, inner in value.items():
            yield from _leaves(inner, (*above, str(key)))
    else:
        yield above, value
