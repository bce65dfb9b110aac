"""Check that the probed hosts can run a training. The second part replaces lost hosts by spares, or drops them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from pipeline.cluster import networks
from pipeline.cluster.agent.host.hardware import count_gpus
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from pipeline.keys.installed import version
from trainers.contract.host_facts import OLDEST_PYTHON, HostFacts


def validate_hosts(cluster: Cluster, facts: Sequence[HostFacts], *, backend: str = "auto") -> None:
    """Raise HostError if hosts can't take part; it lists all of them, the values seen and the fixes."""
    problems = [*_same_node(facts), *_loopback(facts)]
    for host, fact in zip(cluster.hosts, facts, strict=True):
        unfit = [
            *networks.interface_problems(host, fact, is_alone=cluster.nnodes == 1),
            *_unfit(host, fact, backend, cluster.device),
        ]
        problems += [f"  {host.label}: {what}" for what in unfit]
    problems += _torch_versions(facts)
    if problems:
        raise HostError("\n".join(["the cluster can't run this:", *problems]))


def check_batch(global_batch_size: int, world_size: int, accumulate_steps: int = 1, shards: int = 0) -> None:
    """Raise UsageError if the global batch can't be divided among the ranks (or ``shards``) and micro-batches."""
    parts = (shards or world_size) * accumulate_steps
    if global_batch_size % parts == 0:
        return
    below = global_batch_size // parts * parts
    nearest = " or ".join(str(size) for size in (below, below + parts) if size)
    is_small = world_size > global_batch_size and not shards
    whose = f"{counted(shards, 'part')} (trainer.shards)" if shards else counted(world_size, "rank")
    micro = "" if accumulate_steps == 1 else f" × {accumulate_steps} micro-batches (trainer.accumulate_steps)"
    raise UsageError(
        f"trainer.global_batch_size={global_batch_size} can't be shared evenly by {whose}{micro};"
        f" nearest that can: {nearest}"
        + (f", or at most {counted(global_batch_size, 'rank')} (cluster.nproc_per_node)" if is_small else "")
    )


def _same_node(facts: Sequence[HostFacts]) -> list[str]:
    """Report hosts that are one computer under several names."""
    by_node = defaultdict(list)
    for fact in facts:
        by_node[fact.machine or fact.identity].append(fact)
    return [
        f"  {' and '.join(f'{fact.host} ({fact.address})' for fact in same)} are the same host ({same[0].hostname}); "
        "name each node once, more ranks on it are cluster.hosts[].nproc_per_node"
        for same in by_node.values()
        if len(same) > 1
    ]


def _loopback(facts: Sequence[HostFacts]) -> list[str]:
    """Report hosts with a loopback address if other hosts have other addresses and so can't reach them."""
    is_loopback = [fact.address.startswith("127.") or fact.address == "::1" for fact in facts]
    if all(is_loopback) or not any(is_loopback):
        return []
    return [
        f"  {fact.host}: its address is {fact.address}, where the other nodes can't reach it; "
        "set cluster.hosts[].address"
        for fact, loopback in zip(facts, is_loopback, strict=True)
        if loopback
    ]


def _unfit(host: Host, fact: HostFacts, backend: str, device: str) -> list[str]:
    """Report what a host lacks: Python, torch, or GPUs for the device and backend."""
    problems = []
    python = tuple(int(part) for part in fact.python_version.split(".")[:2])
    if python < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        problems.append(
            f"{fact.python} is Python {fact.python_version}; {oldest} or newer is needed: set cluster.python"
        )
    if fact.torch_version is None:
        version_here = (version("torch") or "").partition("+")[0]  # another version would differ from the run's key
        torch = f"torch=={version_here}" if version_here else "torch"
        problems.append(
            f"the image has no torch for its {fact.python}; cluster.container=<an image that has it>"
            if fact.container
            else f"{fact.python} has no torch; install it there ({fact.python} -m pip install {torch}, or "
            f"uv pip install --python {fact.python} {torch}) "
            "or point cluster.python at an interpreter that has it"
        )
    # the probe counts all GPUs; the configured environment, and runs that share the host, leave fewer
    gpus = visible_gpus(fact.gpus // host.shared_by, {**host.placement, **host.env})
    count = counted(gpus, "GPU")
    if device == "cuda" and gpus == 0:
        problems.append("cluster.device=cuda, but it has no GPU that CUDA may see; take cluster.device=cpu")
    if device == "auto" and gpus > 0:  # the run's key was computed before the probe
        take = "take cluster.device=cuda, or cluster.device=cpu to leave them idle"
        problems.append(f"it has {count}, and the run's key says cpu; {take}")
    if device == "cpu":
        gpus = 0
    if backend == "nccl" and gpus == 0:
        problems.append("strategy.backend=nccl, but it has no GPU; take strategy.backend=gloo")
    elif backend in ("auto", "nccl") and 0 < gpus < host.nproc_per_node:
        problems.append(
            f"nproc_per_node={host.nproc_per_node} is more than its {count}, and NCCL refuses two ranks on one; "
            f"set nproc_per_node to at most {gpus}, or strategy.backend=gloo"
        )
    return problems


def visible_gpus(installed: int, env: Mapping[str, str]) -> int:
    """Return how many of a host's GPUs are visible in the configured environment."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return installed
    return min(installed, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))


def usable_gpus() -> int:
    """Count the GPUs here that CUDA may see (``CUDA_VISIBLE_DEVICES``); 0 if torch was built without CUDA."""
    count = count_gpus()
    return 0 if count and (version("torch") or "").endswith("+cpu") else count


def _torch_versions(facts: Sequence[HostFacts]) -> list[str]:
    """Report different torch releases, which may use different protocols. Ignore local suffixes (+cpu, +cu128)."""
    versions = {fact.host: fact.torch_version.partition("+")[0] for fact in facts if fact.torch_version}
    if len(set(versions.values())) <= 1:
        return []
    seen = ", ".join(f"{host} has {version}" for host, version in versions.items())
    return [f"  torch differs: {seen}; install the same version everywhere, or set cluster.python"]


# -------------------------------------------------------------------------------------------------------------- spares
def replace_lost(cluster: Cluster, gone: Collection[str]) -> tuple[Cluster, list[str]] | None:
    """Put spares in the places of the hosts ``gone``; None if one of them has no fitting spare.

    Returns the new cluster and a line for each replacement. A spare must have as many ranks and the same variables as
    the host that it replaces, because both count in the key. Spares among ``gone`` are dropped.
    """
    spares = [spare for spare in cluster.spares if spare.label not in gone]
    hosts, lines = list(cluster.hosts), []
    for node_rank, host in enumerate(cluster.hosts):
        if host.label not in gone:
            continue
        spare = next((spare for spare in spares if not why_unfit(spare, host)), None)
        if spare is None:
            return None
        spares.remove(spare)
        hosts[node_rank] = spare
        lines.append(f"{spare.label} takes the place of {host.label}, as node {node_rank}")
    return dataclasses.replace(cluster, hosts=tuple(hosts), spares=tuple(spares)), lines


def go_on_with_fewer(
    cluster: Cluster, gone: Collection[str], fits: Callable[[int], bool]
) -> tuple[Cluster, list[str]] | None:
    """Keep as many of the remaining hosts as possible, at least ``min_nodes``; None if that isn't possible.

    Returns the new cluster and a line about the change. Remaining hosts that can't be used become spares. ``fits``:
    returns whether the run can go on with a number of ranks (its batch must be divisible by them).
    """
    remaining = [host for host in cluster.hosts if host.label not in gone]
    for count in range(len(remaining), max(cluster.settings.min_nodes, 1) - 1, -1):
        hosts, idle = remaining[:count], remaining[count:]
        ranks = sum(host.nproc_per_node for host in hosts)
        if cluster.settings.min_nodes and fits(ranks):
            spares = (*(spare for spare in cluster.spares if spare.label not in gone), *idle)
            line = f"going on without {', '.join(gone)}: {counted(count, 'node')}, {counted(ranks, 'rank')}"
            return dataclasses.replace(cluster, hosts=tuple(hosts), spares=spares), [line]
    return None


def unfit_spares(cluster: Cluster, gone: Collection[str]) -> list[str]:
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
        own_value, wanted_value = spare.env.get(name), host.env.get(name)
        if own_value != wanted_value:
            return f"its env has {name}={_shown(own_value)}, and that of {host.label} {_shown(wanted_value)}"
        if spare.secrets.get(name) != host.secrets.get(name):
            return f"its env has another {name} (a secret) than that of {host.label}"
    return ""


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
