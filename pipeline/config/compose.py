"""Hydra composition on the controller: the result of a ``@hydra.main`` application, with errors in one line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.cluster.launchers.settings import MISSING
from pipeline.config.errors.hydra_errors import explain, explain_interpolation, no_value
from pipeline.config.overrides.words import for_hydra, quoted_run
from pipeline.config.schema_store import register
from pipeline.config.step_source import named_step
from pipeline.config.values import leaves
from pipeline.core import redact
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT, conf_dirs

CONF_DIRS = conf_dirs(ROOT)
"""Hydra looks in the first folder, then in the others (hydra_plugins/paceline_plugins.py)."""

CONFIG_NAME = "config"
HYDRA_VERSION_BASE = "1.3"
_LITERAL_FIELDS = ("program.args", "program.env")  # OmegaConf's ``???`` (no value) is ordinary text in them
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SHARED = re.compile(r"[+~]*(?P<group>cluster|paths|tracking)\b")


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

    Raises UsageError: an override that Hydra refuses; the text names it, the nearest match and the valid options.
    """
    with hydra_ready():
        return compose_now(overrides)


def compose_now(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose like ``compose_config``, inside ``hydra_ready()``; ``with_hydra`` keeps Hydra's own section."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra raises a dozen unrelated types, ValueError and AssertionError among them
        raise explain(error, list(overrides), _composed_or_none) from error


def _composed_or_none(overrides: Sequence[str]) -> DictConfig | None:
    """Compose while an error is explained; return None if Hydra refuses the overrides."""
    try:
        return compose(CONFIG_NAME, overrides=for_hydra(overrides))
    except Exception:  # the same dozen types
        return None


def as_yaml(resolved: Mapping[str, Any]) -> str:
    """Return the text of config.yaml for a resolved configuration, with every ``${`` escaped."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dict(resolved))))


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    is_text = isinstance(value, str) and "${" in value
    return _INTERPOLATION.sub(lambda match: f"{match[1] * 2}\\${{", value) if is_text else value


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return plain containers with every interpolation resolved.

    Values of environment variables with a secret name become ``Secret`` texts.

    Raises UsageError: an interpolation that names nothing, or a group that was deleted.
    """
    try:
        container = OmegaConf.to_container(config, resolve=True)
        for field, value in leaves(container):
            if value == MISSING and not field.startswith(_LITERAL_FIELDS):
                raise no_value(field)
    except OmegaConfBaseException as error:
        raise explain_interpolation(error, config) from error
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    names = redact.referenced(OmegaConf.to_container(config, resolve=False))
    values = [value for name in names if (value := os.environ.get(name)) and redact.needs_masking(name, value)]
    whole = redact.marked(container, values) if values else container
    return {str(key): value for key, value in whole.items()}


def compose_parent(
    run: str, words: Sequence[str], *, children: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Compose the parent run that ``init.run`` names, on the cluster of its child unless ``run`` names another.

    Args:
        run: the overrides of the parent run, as a shell would split them.
        words: the overrides of the child; those of cluster, paths and tracking hold for both.
        children: ``run`` of every run between this parent and the first child, the first child's first.

    Returns the resolved configuration, and the overrides that it was composed from.

    Raises UsageError: an override that can't work, or a run that would start from itself; ValueError: ``run`` can't be
    split.
    """
    if run in children:
        raise UsageError(f"init.run leads back to itself: {' → '.join((*children, run))}")
    own = [quoted_run(word) for word in shlex.split(run)]
    names_cluster = any(word.startswith("cluster=") for word in own)
    shared = [(word, match["group"]) for word in words if (match := _SHARED.match(word))]
    overrides = (*(word for word, group in shared if not (names_cluster and group == "cluster")), *own)
    resolved = resolve(compose_config(overrides))
    if named_step(resolved) is not None:
        raise UsageError("its data comes from a step", hint=f"doit train {run}, then init.weights=<its key>")
    return resolved, overrides
