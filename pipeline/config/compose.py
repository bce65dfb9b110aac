"""Compose configurations with Hydra: the result of a ``@hydra.main`` application, with errors in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.errors.explain import explain, explain_interpolation, missing
from pipeline.config.overrides.words import for_hydra
from pipeline.config.schema_store import register
from pipeline.core import redact
from pipeline.core.places import ROOT, conf_dirs

CONF_DIRS = conf_dirs(ROOT)
"""Hydra looks in the first one, then in the others (hydra_plugins/paceline_search_path.py)."""

CONFIG_NAME = "config"
HYDRA_VERSION_BASE = "1.3"
MISSING = "???"
"""OmegaConf's mark of a field without a value; in arguments and variables of a script a text like any other."""
_OF_A_SCRIPT = ("program.args", "program.env")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


@contextmanager
def hydra_ready() -> Iterator[None]:
    """Set up Hydra's global state for compositions, and restore it afterwards."""
    register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIRS[0]), version_base=HYDRA_VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose ``conf/config.yaml`` with Hydra overrides, in the order given.

    Raises:
        UsageError: an override that Hydra refuses; the text names it, the nearest match and the valid options.
    """
    with hydra_ready():
        return compose_now(overrides)


def compose_now(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose inside of ``hydra_ready``; ``with_hydra`` keeps Hydra's own section."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra raises a dozen unrelated types, ValueError and AssertionError among them
        raise explain(error, list(overrides), _composed_or_none) from error


def _composed_or_none(overrides: Sequence[str]) -> DictConfig | None:
    """Return the composition; None if Hydra refuses it. Used while an error is explained."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides))
    except Exception:  # the same dozen types; the caller only wants to know whether it composes
        return None


def as_yaml(resolved: Mapping[str, Any]) -> str:
    """Return config.yaml of a resolved configuration; each ``${`` in it is text."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_text(dict(resolved))))


def _as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_as_text(inner) for inner in value]
    is_text = isinstance(value, str) and "${" in value
    return _INTERPOLATION.sub(lambda match: f"{match[1] * 2}\\${{", value) if is_text else value


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return plain containers with all interpolations resolved. Values of variables with secret names become Secrets.

    Raises:
        UsageError: an interpolation without target, or a group that was deleted.
    """
    try:
        container = OmegaConf.to_container(config, resolve=True)
        if (key := _missing(container)) is not None:
            raise missing(key)
    except OmegaConfBaseException as error:
        raise explain_interpolation(error, config) from error
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    names = redact.referenced(OmegaConf.to_container(config, resolve=False))
    values = [value for name in names if (value := os.environ.get(name)) and redact.tells(value)]
    whole = redact.marked(container, values) if values else container
    return {str(key): value for key, value in whole.items()}


def _missing(value: Any, key: str = "") -> str | None:
    """Return the first field that has no value."""
    if key in _OF_A_SCRIPT:
        return None
    if isinstance(value, Mapping):
        inside = [(f"{key}.{name}" if key else str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list):
        inside = [(f"{key}[{number}]", inner) for number, inner in enumerate(value)]
    else:
        return key if value == MISSING else None
    return next((found for name, inner in inside if (found := _missing(inner, name)) is not None), None)
