"""The schemas in Hydra's store, where conf/ finds them under the group ``schema``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.config.groups import choice_of
from pipeline.config.schema import OPTIONS, PROGRAMS, RootConfig, SearchConfig, TrackingConfig, installed_programs
from pipeline.core.places import ROOT, conf_dirs
from trainers.core import config as node


@functools.cache  # a sweep composes each trial
def register() -> None:
    """Put all schemas into Hydra's store; calling it twice does no harm."""
    store: Any = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    launcher = {"_target_": "hydra_plugins.paceline_launcher.PacelineLauncher"}
    store.store(group="hydra/launcher", name="paceline", node=launcher)
    store.store(group="schema", name="cluster", node=ClusterConfig)
    store.store(group="schema", name="tracking", node=TrackingConfig)
    store.store(group="schema", name="search", node=SearchConfig)
    store.store(group="schema/trainer", name="default", node=node.TrainerConfig)
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
            schemas[f"{name}.yaml"] = _OptionSchema(f"{name}.yaml", group, functools.partial(options.settings, name))
        for name in options.installed():
            if _has_file(group, name):  # Hydra takes a file and a schema of one name for a defect of all commands
                continue
            defaults = [{f"/schema/{group}@_here_": name}, "_self_"]
            store.store(group=group, name=name, node={"defaults": defaults, choice_of(group): name})


def _has_file(group: str, name: str) -> bool:
    """Whether conf/ has an option of that name: it goes before an installed package's."""
    return any((folder / group / f"{name}.yaml").is_file() for folder in conf_dirs(ROOT))


class _OptionSchema(ConfigNode):
    """Reads an option's settings when Hydra asks for its schema: all thirty take a tenth of a second.

    An option that can't be read raises its UsageError then: it is nobody else's trouble.
    """

    def __init__(self, name: str, group: str, settings: Callable[[], type[Any]]) -> None:
        self._settings = settings
        self._copy: DictConfig | None = None
        self.name, self.group, self.package, self.provider = name, f"schema/{group}", None, None

    @property
    def node(self) -> DictConfig:
        """The schema; the node that Hydra loads is a copy of this one, and has a schema of its own."""
        return self._copy if self._copy is not None else OmegaConf.structured(self._settings())

    @node.setter
    def node(self, value: DictConfig) -> None:
        self._copy = value
