"""Who takes the place, and the ranks, of a host that is gone: a spare, or all that are left, with fewer ranks. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from pipeline.core.cluster import Cluster, Host
from pipeline.core.tables import counted


def replace(cluster: Cluster, gone: Collection[str]) -> tuple[Cluster, list[str]] | None:
    """The cluster with spares in the places of the hosts ``gone``, and a line for each; None where one has no spare.

    A spare has as many ranks as the host that it stands for and the same variables, which are what a run's key knows of
    a host. Each is taken once, and a host that is gone isn't among the spares any more.
    """
    spares = [spare for spare in cluster.spares if spare.label not in gone]
    hosts, lines = list(cluster.hosts), []
    for place, host in enumerate(cluster.hosts):
        if host.label not in gone:
            continue
        spare = next((spare for spare in spares if _alike(spare, host)), None)
        if spare is None:
            return None
        spares.remove(spare)
        hosts[place] = spare
        lines.append(f"{spare.label} takes the place of {host.label}, as node {place}")
    return dataclasses.replace(cluster, hosts=tuple(hosts), spares=tuple(spares)), lines


def shrink(cluster: Cluster, gone: Collection[str], fits: Callable[[int], bool]) -> tuple[Cluster, list[str]] | None:
    """The cluster with as many of the other hosts as can go on without those that are gone, at least ``min_nodes``, and
    a line that says so; None where that isn't allowed. Hosts that aren't needed become spares.

    Args:
        fits: whether a number of ranks can take the run over.
    """
    left = [host for host in cluster.hosts if host.label not in gone]
    for count in range(len(left), max(cluster.min_nodes, 1) - 1, -1):
        hosts, idle = left[:count], left[count:]
        ranks = sum(host.nproc_per_node for host in hosts)
        if cluster.min_nodes and fits(ranks):
            spares = (*(spare for spare in cluster.spares if spare.label not in gone), *idle)
            line = f"going on without {', '.join(gone)}: {counted(count, 'node')}, {counted(ranks, 'rank')}"
            return dataclasses.replace(cluster, hosts=tuple(hosts), spares=spares), [line]
    return None


def _alike(spare: Host, host: Host) -> bool:
    own, other = ((one.nproc_per_node, dict(one.env), dict(one.secrets)) for one in (spare, host))
    return own == other
