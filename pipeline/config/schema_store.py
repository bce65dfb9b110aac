"""The schemas in Hydra's store, where conf/ finds them under the group ``schema``.

A module without the imports of ``compose``, as benchmarks/noop.py composes with bare Hydra and these schemas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.config import own_defaults
from pipeline.config.overrides.option_groups import choice_of
from pipeline.config.schema import OPTIONS, PROGRAMS, RootConfig, SearchConfig, TrackingConfig, installed_programs
from pipeline.core.options import Options
from pipeline.core.places import ROOT, conf_dirs
from trainers.core import config as node


@functools.cache  # a sweep composes each trial
def register() -> None:
    """Put all schemas into Hydra's store; a second call does nothing."""
    store: Any = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    launcher = {"_target_": "hydra_plugins.paceline_plugins.PacelineLauncher"}
    store.store(group="hydra/launcher", name="paceline", node=launcher)
    store.store(group="schema", name="cluster", node=ClusterConfig)
    store.store(group="schema", name="tracking", node=TrackingConfig)
    store.store(group="schema", name="search", node=SearchConfig)
    store.store(group="schema/trainer", name="default", node=node.TrainerConfig)
    own = store.repo.setdefault(own_defaults.GROUP, {})
    for name in ("user", "project"):
        content = functools.partial(_own_defaults, name)
        own[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", own_defaults.GROUP, "_global_", content)
    for name, settings in PROGRAMS.items():
        store.store(group="schema/program", name=name, node=settings)
    for name, file in installed_programs().items():
        if _has_file("program", name):
            continue
        script = {"defaults": [{"/schema/program@_here_": "script"}, "_self_"], "name": "script", "script": file}
        store.store(group="program", name=name, node=script)
    for group, options in OPTIONS.items():
        schemas = store.repo["schema"].setdefault(group, {})
        for name in options.names():
            schema = functools.partial(_schema, options, name)
            schemas[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", f"schema/{group}", None, schema)
        for name in options.installed():
            if _has_file(group, name):  # otherwise every command fails: Hydra refuses a file and a schema of one name
                continue
            defaults = [{f"/schema/{group}@_here_": name}, "_self_"]
            store.store(group=group, name=name, node={"defaults": defaults, choice_of(group): name})


def _has_file(group: str, name: str) -> bool:
    """True if conf/ has an option of that name, which takes precedence over an installed package's."""
    return any((folder / group / f"{name}.yaml").is_file() for folder in conf_dirs(ROOT))


def _schema(options: Options, name: str) -> DictConfig:
    schema: DictConfig = OmegaConf.structured(options.settings(name))
    return schema


def _own_defaults(name: str) -> DictConfig:
    return OmegaConf.create(own_defaults.content(name))


class _LazyNode(ConfigNode):
    """A node of Hydra's store that is read when Hydra asks for it.

    All thirty settings classes together take 0.1 s, and the user's own defaults may change. An option that can't be
    read raises its error only in commands that use it.
    """

    def __init__(self, name: str, group: str, package: str | None, read: Callable[[], DictConfig]) -> None:
        self._read = read
        self._copy: DictConfig | None = None
        self.name, self.group, self.package, self.provider = name, group, package, None

    @property
    def node(self) -> DictConfig:
        """The content. Hydra loads a copy of this node and sets the content of the copy."""
        return self._copy if self._copy is not None else self._read()

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._copy = value
