"""The registry of launchers. Adding one: a module, a line here, a YAML in conf/cluster (docs/launchers.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.errors import UsageError, hint

if TYPE_CHECKING:
    from pipeline.launchers.base import Launcher
    from pipeline.types import Cluster

LAUNCHERS: dict[str, str] = {
    "local": "pipeline.launchers.local:LocalLauncher",
    "pssh": "pipeline.launchers.pssh:PsshLauncher",
}
"""name → ``module:class``; the module is imported on use."""


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


def _class(cluster: Cluster) -> Any:
    target = LAUNCHERS.get(cluster.launcher)
    if target is None:
        what = f"cluster.launcher={cluster.launcher!r} is not a launcher"
        raise UsageError(f"{what}; {hint(cluster.launcher, LAUNCHERS)}")
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
