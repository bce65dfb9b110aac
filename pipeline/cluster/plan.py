"""Render the launch plan from the cluster and the facts of its hosts. Pure: no clock, environment, files, or chance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeline.cluster import networks
from pipeline.cluster.agent.requests import WarmEnvironment
from pipeline.cluster.launchers.base import AttemptSpec, workdir_of
from pipeline.cluster.launchers.settings import capabilities, container_of_node
from pipeline.cluster.validation import visible_gpus
from pipeline.core.errors import UsageError
from pipeline.core.program import TORCHRUN_FILE
from pipeline.core.specs import Cluster, Host, LaunchPlan, NodePlan
from pipeline.keys import rank_environment
from trainers.contract import run_folder, variables
from trainers.contract.host_facts import HostFacts

LOOPBACK = "127.0.0.1"
_NUMA_TORCH = (2, 9)  # the first release whose torchrun has --numa-binding
WORKERS_TERM_S = 3  # torchrun's limit for workers that ignore TERM; its default of 30 s is more than our 10 s


def render(
    cluster: Cluster, facts: Sequence[HostFacts], spec: AttemptSpec, *, run_id: str, master_port: int
) -> LaunchPlan:
    """Return every command, environment and folder of one attempt. Node ranks follow the order of the hosts.

    ``run_id``: TORCHELASTIC_RUN_ID, new for each start. ``master_port``: a port that was free on node 0.
    """
    address = facts[0].address if cluster.nnodes > 1 else LOOPBACK
    devices = networks.nccl_devices(facts) if cluster.device == "cuda" else [None for _ in facts]
    first_ranks = [0, *accumulate(host.nproc_per_node for host in cluster.hosts)][:-1]
    nodes = []
    for number, (host, fact, first_rank, nccl_devices) in enumerate(
        zip(cluster.hosts, facts, first_ranks, devices, strict=True)
    ):
        where = _place(cluster, number, fact, spec, run_id)
        options: dict[str, str | int] = {
            "nproc-per-node": host.nproc_per_node,
            "nnodes": cluster.nnodes,
            "node-rank": number,
            "rdzv-backend": "static",  # node ranks follow the list of hosts, and nothing that a peer sends is unpickled
            "rdzv-id": run_id,
            "master-addr": address,
            "master-port": master_port,
            "local-addr": fact.address,
            "max-restarts": 0,
            "log-dir": f"{where.state_dir}/ranks",
            "redirects": 3,  # one file a rank, so the agent knows each line's rank
            **({"numa-binding": "node"} if _binds_to_numa_nodes(cluster, host, fact) else {}),
        }
        if cluster.nnodes == 1:
            network = networks.loopback(fact)
        else:
            network = networks.variables(host, fact, nccl_devices, where.state_dir)
        env = environment(
            host,
            fact,
            run_dir=where.run_dir,
            device=cluster.device,
            one_thread=spec.script is None and cluster.device != "cuda",
            network=network,
        )
        nodes.append(
            NodePlan(
                node_rank=number,
                host=host.label,
                identity=fact.identity,
                machine=fact.machine or "",
                address=fact.address,
                argv=_argv(spec, fact.python, where, options),
                env={
                    **({variables.PROJECT: spec.project} if spec.script is not None else {}),
                    **env,
                    variables.COLLECTIVE_TIMEOUT_S: f"{cluster.settings.collective_timeout_s:g}",
                },
                run_dir=where.run_dir,
                data_dir=where.data_dir,
                state_dir=where.state_dir,
                first_rank=first_rank,
                nproc_per_node=host.nproc_per_node,
                container=container_of_node(cluster, fact),
            )
        )
    return LaunchPlan(
        run_key=spec.run_key,
        run_id=run_id,
        attempt=spec.attempt,
        launcher=cluster.launcher,
        master_addr=address,
        master_port=master_port,
        world_size=cluster.world_size,
        lease_s=cluster.settings.lease_s,
        stall_s=cluster.settings.stall_s,
        collective_timeout_s=cluster.settings.collective_timeout_s,
        checkpoint_fetch_s=cluster.settings.checkpoint_fetch_s,
        # a script may set variables before it imports torch; a parent, which outlives the run, would keep a container
        warm=cluster.settings.warm and spec.script is None and cluster.container is None,
        nodes=tuple(nodes),
        outputs=spec.outputs,
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Absolute paths on one node: the run folder, the data pack, and the agent's own files."""

    run_dir: str
    data_dir: str
    state_dir: str


def _place(cluster: Cluster, number: int, facts: HostFacts, spec: AttemptSpec, run_id: str) -> _Place:
    """Return the folders of a run on node ``number``. Without a pack ``data_dir`` is empty.

    Hosts that don't share the run folder have one for each start (run id) and node, because homes are often shared
    over NFS.
    """
    able = capabilities(cluster)
    if able.shares_run_dir:
        state_dir = spec.run_dir / run_folder.ATTEMPTS / str(spec.attempt) / f"agent-{run_id}"
        state_dir = state_dir / f"node{number}" if able.hosts_are_granted else state_dir
        data_dir = str(spec.pack.path) if spec.pack else ""
        return _Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))
    workdir = workdir_of(cluster)
    if workdir == "~" or workdir.startswith("~/"):
        workdir = facts.home + workdir[1:]
    node_dir = f"{workdir}/runs/{run_id}/node{number}"
    data_dir = facts.pack_path or (f"{workdir}/data/{spec.pack.digest}" if spec.pack else "")
    return _Place(run_dir=node_dir, data_dir=data_dir, state_dir=f"{node_dir}/agent")


def _binds_to_numa_nodes(cluster: Cluster, host: Host, fact: HostFacts) -> bool:
    """Return whether host and torchrun can bind each rank to the cores near its GPU."""
    gpus = visible_gpus(fact.gpus, {**host.placement, **host.env})
    release = tuple(int(part) for part in re.findall(r"\d+", fact.torch_version or "")[:2])
    is_able = fact.can_bind_numa and release >= _NUMA_TORCH
    return cluster.device == "cuda" and is_able and host.nproc_per_node <= gpus


def _argv(spec: AttemptSpec, python: str, where: _Place, options: Mapping[str, str | int]) -> tuple[str, ...]:
    config = ("--config", f"{where.run_dir}/config.json")
    starter: tuple[str, ...] = (
        python,
        f"{where.run_dir}/code/{TORCHRUN_FILE}",
        *(f"--{name}={value}" for name, value in options.items()),
    )
    if spec.script is None:
        return (*starter, "-m", spec.trainer, *config)
    places = spec.pack.inside if spec.pack is not None else ()
    data = [word for inside in places for word in ("--data", f"{where.data_dir}/{inside}")]
    of_script = ("--script", spec.script, "--node-rank", str(options["node-rank"]), *data)
    if not spec.uses_torchrun:
        starter, of_script = (python,), (*of_script, "--log-dir", str(options["log-dir"]))
    return (python, "-m", spec.trainer, *config, *of_script, "--", *starter)


def environment(
    host: Host,
    fact: HostFacts,
    *,
    run_dir: str,
    device: str = "auto",
    one_thread: bool = False,
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables to add to a node's shell environment for torchrun. The host's ``env`` overrides them.

    Args:
        one_thread: one thread a rank instead of its share of the cores. On CPUs the last bits of a result depend on the
            number of threads, which therefore must not depend on the host.
        network: the variables that choose the ranks' network.
    """
    threads = 1 if one_thread else max(1, fact.cpus // (host.nproc_per_node * host.shared_by))
    env = {**rank_environment.ALWAYS, "PET_SHUTDOWN_TIMEOUT": str(WORKERS_TERM_S), "OMP_NUM_THREADS": str(threads)}
    return {
        **env,
        **(network or {}),
        **host.placement,
        **host.env,
        variables.DEVICE: "cuda" if device == "cuda" else "cpu",  # as in the run's key
        "PYTHONPATH": _python_path(f"{run_dir}/code", host.env.get("PYTHONPATH", "")),
    }


def warm_environment(cluster: Cluster) -> WarmEnvironment | None:
    """Return the part of the ranks' environment that is known before the probe, to start warm parents with it.

    None if ranks run in containers, if the hosts' settings differ, or if they set PYTHONPATH, because that decides what
    Python imports at its start.
    """
    if cluster.container is not None:
        return None
    settings = [{**host.placement, **host.env} for host in cluster.hosts]
    ranks = {host.nproc_per_node * host.shared_by for host in cluster.hosts}
    if any(one != settings[0] for one in settings) or len(ranks) > 1 or "PYTHONPATH" in settings[0]:
        return None
    one_thread = cluster.device != "cuda"
    env = {**rank_environment.ALWAYS, **({"OMP_NUM_THREADS": "1"} if one_thread else {}), **settings[0]}
    return WarmEnvironment(env=env, ranks_per_host=0 if one_thread else ranks.pop())


def _python_path(code: str, configured: str) -> str:
    """Return PYTHONPATH with the snapshot first, so that exactly the hashed code runs. Raises UsageError.

    Relative folders are left out: they are folders of the project, whose modules are in the snapshot.
    """
    if ":" in code:
        raise UsageError(
            f"the run's code would lie in {code}, and PYTHONPATH separates folders by ':'",
            hint="paths.runs=<a folder without ':' in its path>, on hosts cluster.workdir",
        )
    return ":".join([code, *(entry for entry in configured.split(":") if entry.startswith("/"))])
