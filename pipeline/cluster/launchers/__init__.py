"""The launchers: ways to reach the hosts of a cluster and to run torchrun there, one module each.

``cluster.launcher`` names the module, which ``create`` imports on use. docs/adding-launchers.md shows how to add one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.cluster.launchers.base import Scheduler, Transport
from pipeline.cluster.launchers.settings import LAUNCHERS as LAUNCHERS
from pipeline.cluster.launchers.settings import capabilities as capabilities
from pipeline.core.errors import UsageError

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher
    from pipeline.cluster.launchers.base import AttemptSpec
    from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
    from pipeline.cluster.launchers.job_follower import JobFollower
    from pipeline.cluster.launchers.transport.streams import Streams
    from pipeline.core.specs import Cluster

    Launcher: TypeAlias = AgentLauncher | GrantedLauncher
    """Runs a rendered plan on the hosts of one cluster."""
    LiveStreams: TypeAlias = Streams | JobFollower
    """The live streams of one attempt."""


def create(cluster: Cluster) -> Launcher:
    """Return the launcher that ``cluster.launcher`` names, bound to the cluster. Raises UsageError, HostError."""
    # imported here, as a command needs only one of the two, and none if its run is finished
    if capabilities(cluster).hosts_are_granted:
        from pipeline.cluster.launchers.granted_launcher import GrantedLauncher

        return GrantedLauncher(_backend_class(cluster)(cluster))
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

    return AgentLauncher(_backend_class(cluster)(cluster))


def submission(cluster: Cluster, spec: AttemptSpec) -> str:
    """Return the script for the scheduler, or the commands that reach hosts, for the user. Pure. Raises UsageError."""
    rendered: str = _backend_class(cluster).render(cluster, spec)
    return rendered


def _backend_class(cluster: Cluster) -> Any:
    """Return the class of the launcher's module that derives from ``base.Transport`` or ``base.Scheduler``."""
    module = LAUNCHERS.module(cluster.launcher)
    base = Scheduler if capabilities(cluster).hosts_are_granted else Transport
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
            return value
    raise UsageError(f"cluster.launcher={cluster.launcher}: {module.__name__} has no class of {base.__name__}")
