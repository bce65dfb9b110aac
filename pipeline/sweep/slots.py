"""Divide the cluster of a sweep among its slots, and describe a slot's hosts in the configuration of a trial. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pipeline.cluster import launchers
from pipeline.config.build import RunConfig
from pipeline.config.schema import SweepConfig
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_text
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted

_GPUS = "CUDA_VISIBLE_DEVICES"


def slots(cluster: Cluster, settings: SweepConfig, gpus: Sequence[str]) -> tuple[Cluster, ...]:
    """Return the part of the cluster for each slot; by default one slot with the whole cluster.

    ``sweep.nodes`` splits the hosts into groups. ``sweep.slots`` lets several trials share each group: each gets its
    own GPUs (numbered from 0 on the host) and a share of the cores.

    Args:
        gpus: the local GPUs in the form of CUDA_VISIBLE_DEVICES, for ``cluster=local``.

    Raises:
        UsageError: the groups don't fit, or would give a trial another key in another slot.
    """
    groups = _groups(cluster, settings.nodes)
    shares = _shares(cluster, settings.slots, gpus)
    if shares == 1:
        return groups
    for host in cluster.hosts:
        if _GPUS in host.env:
            raise UsageError(
                f"sweep.slots deals out the GPUs of {host.label}, and cluster.env sets {_GPUS}={host.env[_GPUS]}; "
                "take it out of cluster.env (for cluster=local export it in the shell instead)"
            )
    on_gpus = bool(gpus) if _is_here(cluster) else True
    return tuple(_part_of_group(group, part, shares, gpus, on_gpus) for group in groups for part in range(shares))


def _groups(cluster: Cluster, nodes: Any) -> tuple[Cluster, ...]:
    """Split the hosts in order into groups of ``nodes``; remaining hosts stay idle."""
    if nodes is None:
        return (cluster,)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= cluster.nnodes:
        raise UsageError(f"sweep.nodes={nodes} must lie between 1 and the cluster's {counted(cluster.nnodes, 'host')}")
    hosts = cluster.hosts
    if _are_granted(cluster):  # each slot is a separate scheduler job, whose hosts have no names yet
        return (dataclasses.replace(cluster, hosts=hosts[:nodes]),) * (len(hosts) // nodes)
    groups = [hosts[at : at + nodes] for at in range(0, len(hosts) - nodes + 1, nodes)]
    for group in groups[1:]:
        if _topology(group) != _topology(groups[0]):
            raise UsageError(
                f"sweep.nodes={nodes}: {_names(group)} and {_names(groups[0])} differ in nproc_per_node or env, "
                "so a trial's key would depend on where it ran; give the hosts equal values"
            )
    return tuple(dataclasses.replace(cluster, hosts=group) for group in groups)


def _shares(cluster: Cluster, wanted: Any, gpus: Sequence[str]) -> int:
    if wanted == "auto":
        if not _is_here(cluster) or any(_GPUS in host.env for host in cluster.hosts):
            return 1
        return max(1, len(gpus) // cluster.hosts[0].nproc_per_node)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"sweep.slots={wanted} must be a whole number from 1, or auto")
    need = wanted * cluster.hosts[0].nproc_per_node
    if _is_here(cluster) and gpus and need > len(gpus) and wanted > 1:
        raise UsageError(
            f"sweep.slots={wanted} with {counted(cluster.hosts[0].nproc_per_node, 'rank')} each needs {need} GPUs, "
            f"there are {len(gpus)}; set cluster.nproc_per_node={max(1, len(gpus) // wanted)}, or fewer slots"
        )
    return wanted


def _is_here(cluster: Cluster) -> bool:
    """Return True if the only host is this one, whose GPUs are known."""
    return launchers.capabilities(cluster).is_this_computer


def _are_granted(cluster: Cluster) -> bool:
    return launchers.capabilities(cluster).hosts_are_granted


def _part_of_group(group: Cluster, part: int, shares: int, gpus: Sequence[str], on_gpus: bool) -> Cluster:
    hosts = []
    for host in group.hosts:
        mine = range(part * host.nproc_per_node, (part + 1) * host.nproc_per_node)
        names = [gpus[at] if _is_here(group) and at < len(gpus) else str(at) for at in mine]
        placement = {_GPUS: ",".join(names)} if on_gpus else {}
        hosts.append(dataclasses.replace(host, placement=placement, shared_by=shares))
    return dataclasses.replace(group, hosts=tuple(hosts))


def _topology(hosts: Sequence[Host]) -> list[Any]:
    return [(host.nproc_per_node, dict(host.env)) for host in hosts]


def _names(hosts: Sequence[Host]) -> str:
    return " + ".join(host.label for host in hosts)


def raw_cluster(raw: dict[str, Any], whole: Cluster, part: Cluster) -> dict[str, Any]:
    """Return the ``cluster`` section of config.json for a trial that uses ``part`` of the hosts of ``whole``."""
    if part.nnodes == whole.nnodes:
        return raw
    if _are_granted(part):
        return {**raw, "nnodes": part.nnodes}
    return {**raw, "hostfile": None, "hosts": [_host_entry(host) for host in part.hosts]}


def host_overrides(whole: Cluster, part: Cluster) -> tuple[str, ...]:
    """Return the overrides that select ``part``'s hosts, to repeat a trial; empty for the whole cluster."""
    if part.nnodes == whole.nnodes:
        return ()
    return (f"cluster.nnodes={part.nnodes}",) if _are_granted(part) else _explicit_hosts(part)


def placed(config: RunConfig, part: Cluster) -> RunConfig:
    """Move a trial that was configured for the first slot to another slot. Its key is unchanged."""
    if [host.label for host in part.hosts] == [host.label for host in config.cluster.hosts]:
        return dataclasses.replace(config, cluster=part)
    new_hosts = _explicit_hosts(part)  # TrialFactory.trial has appended as many words for the hosts of the first slot
    section = {**config.resolved["cluster"], "hostfile": None, "hosts": [_host_entry(host) for host in part.hosts]}
    return dataclasses.replace(
        config,
        cluster=part,
        resolved={**config.resolved, "cluster": section},
        overrides=(*config.overrides[: -len(new_hosts)], *new_hosts),
    )


def _explicit_hosts(part: Cluster) -> tuple[str, ...]:
    """Return the overrides that list each host of ``part``."""
    hosts = [_fields_that_are_set(host) for host in part.hosts]
    return ("cluster.hostfile=null", f"cluster.hosts={hydra_text(hosts)}")


def _host_entry(host: Host) -> dict[str, Any]:
    """Return the host as ``cluster.hosts`` lists it."""
    entry = dataclasses.asdict(host)
    return {name: value for name, value in entry.items() if name not in ("placement", "shared_by", "secrets")}


def _fields_that_are_set(host: Host) -> dict[str, Any]:
    return {name: value for name, value in _host_entry(host).items() if value not in (None, {})}
