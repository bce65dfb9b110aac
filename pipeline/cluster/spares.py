"""Replace lost hosts by spares, or go on with fewer hosts and ranks. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted


def replace(cluster: Cluster, gone: Collection[str]) -> tuple[Cluster, list[str]] | None:
    """Put spares in the places of the hosts ``gone``; None if one of them has no fitting spare.

    Returns the new cluster and a line for each replacement. A spare must have as many ranks and the same variables as
    the host that it replaces, because both count in the key. Spares among ``gone`` are dropped.
    """
    spares = [spare for spare in cluster.spares if spare.label not in gone]
    hosts, lines = list(cluster.hosts), []
    for place, host in enumerate(cluster.hosts):
        if host.label not in gone:
            continue
        spare = next((spare for spare in spares if not why_unfit(spare, host)), None)
        if spare is None:
            return None
        spares.remove(spare)
        hosts[place] = spare
        lines.append(f"{spare.label} takes the place of {host.label}, as node {place}")
    return dataclasses.replace(cluster, hosts=tuple(hosts), spares=tuple(spares)), lines


def shrink(cluster: Cluster, gone: Collection[str], fits: Callable[[int], bool]) -> tuple[Cluster, list[str]] | None:
    """Keep as many of the remaining hosts as possible, at least ``min_nodes``; None if that isn't possible.

    Returns the new cluster and a line about the change. Remaining hosts that can't be used become spares. ``fits``:
    tells whether the run can go on with a number of ranks.
    """
    left = [host for host in cluster.hosts if host.label not in gone]
    for count in range(len(left), max(cluster.settings.min_nodes, 1) - 1, -1):
        hosts, idle = left[:count], left[count:]
        ranks = sum(host.nproc_per_node for host in hosts)
        if cluster.settings.min_nodes and fits(ranks):
            spares = (*(spare for spare in cluster.spares if spare.label not in gone), *idle)
            line = f"going on without {', '.join(gone)}: {counted(count, 'node')}, {counted(ranks, 'rank')}"
            return dataclasses.replace(cluster, hosts=tuple(hosts), spares=spares), [line]
    return None


def idle(cluster: Cluster, gone: Collection[str]) -> list[str]:
    """Return a line for each spare that fits none of the places of the hosts ``gone``."""
    lines = []
    for spare in cluster.spares:
        reasons = [why_unfit(spare, host) for host in cluster.hosts if host.label in gone]
        if reasons and all(reasons) and spare.label not in gone:
            lines.append(f"spare {spare.label} can't take its place: {reasons[0]}")
    return lines


def unused_warning(cluster: Cluster) -> str:
    """Return a warning if spares are configured but can never be used, else ''."""
    if not cluster.spares or cluster.settings.max_restarts:
        return ""
    return (
        "WARNING: cluster.spares take the places of lost hosts in a further attempt, and cluster.max_restarts=0 "
        "allows none; write cluster.max_restarts=1 or more"
    )


def why_unfit(spare: Host, host: Host) -> str:
    """Return why a spare can't take a host's place (value seen, value wanted), without secrets; '' if it can."""
    own, wanted = spare.nproc_per_node, host.nproc_per_node
    if own != wanted:
        return f"it has {counted(own, 'rank')} (nproc_per_node={own}), and {host.label} has {wanted}"
    for name in sorted(spare.env.keys() | host.env.keys()):
        seen, value = spare.env.get(name), host.env.get(name)
        if seen != value:
            return f"its env has {name}={_shown(seen)}, and that of {host.label} {_shown(value)}"
        if spare.secrets.get(name) != host.secrets.get(name):
            return f"its env has another {name} (a secret) than that of {host.label}"
    return ""


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
