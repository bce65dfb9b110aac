"""The launchers: one module each, found by its name and imported on use. docs/launchers.md shows how to add one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.core.errors import UsageError
from pipeline.core.options import Options

if TYPE_CHECKING:
    from pipeline.cluster.launchers.base import Launcher
    from pipeline.core.specs import Cluster

LAUNCHERS = Options("cluster.launcher", "pipeline.cluster.launchers", ClusterConfig)


def create(cluster: Cluster) -> Launcher:
    """The launcher that ``cluster.launcher`` names, bound to the cluster. Raises UsageError, HostError."""
    launcher: Launcher = _class(cluster)(cluster)
    return launcher


def placing(cluster: Cluster) -> Launcher:
    """A launcher for ``place`` alone, which is pure: nothing was looked for or started to make it."""
    kind = _class(cluster)
    launcher: Launcher = kind.__new__(kind)
    vars(launcher)["cluster"] = cluster
    return launcher


def capabilities(cluster: Cluster) -> Capabilities:
    """What the cluster's launcher can do; its module isn't imported for it. Raises UsageError."""
    found: Capabilities = LAUNCHERS.settings(cluster.launcher).capabilities
    return found


def _class(cluster: Cluster) -> Any:
    """The class of the launcher's module that derives from ``base.Launcher``."""
    from pipeline.cluster.launchers.base import Launcher

    module = LAUNCHERS.module(cluster.launcher)
    for found in vars(module).values():
        if isinstance(found, type) and Launcher in found.__mro__ and found.__module__ == module.__name__:
            return found
    raise UsageError(f"cluster.launcher={cluster.launcher}: {module.__name__} has no class that derives from Launcher")
