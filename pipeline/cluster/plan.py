"""Render the launch plan: every command, variable and folder of one attempt on each node, as data (plan.json).

``render`` is pure: it reads no clock, environment or file, and uses no random numbers. So tests and `doit plan` see
exactly what would run.
"""

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
WORKERS_TERM_S = 3  # torchrun's limit for ranks that ignore TERM; a stop must take less than 10 s, the default is 30 s


def render(
    cluster: Cluster, facts: Sequence[HostFacts], spec: AttemptSpec, *, run_id: str, master_port: int
) -> LaunchPlan:
    """Return the plan of one attempt. Node ranks follow the order of the hosts.

    ``run_id``: TORCHELASTIC_RUN_ID, new for each start. ``master_port``: a port that was free on node 0.
    """
    address = facts[0].address if cluster.nnodes > 1 else LOOPBACK
    devices = networks.nccl_devices(facts) if cluster.device == "cuda" else [None for _ in facts]
    first_ranks = [0, *accumulate(host.nproc_per_node for host in cluster.hosts)][:-1]
    nodes = []
    for number, (host, fact, first_rank, nccl_devices) in enumerate(
        zip(cluster.hosts, facts, first_ranks, devices, strict=True)
    ):
        folders = _folders(cluster, number, fact, spec, run_id)
        options: dict[str, str | int] = {
            "nproc-per-node": host.nproc_per_node,
            "nnodes": cluster.nnodes,
            "node-rank": number,
            "rdzv-backend": "static",  # c10d wouldn't keep the order of the hosts, and unpickles what peers send
            "rdzv-id": run_id,
            "master-addr": address,
            "master-port": master_port,
            "local-addr": fact.address,
            "max-restarts": 0,
            "log-dir": f"{folders.state_dir}/ranks",
            "redirects": 3,  # stdout and stderr of each rank into files of their own, which the agent merges
            **({"numa-binding": "node"} if _binds_to_numa_nodes(cluster, host, fact) else {}),
        }
        if cluster.nnodes == 1:
            network = networks.loopback(fact)
        else:
            network = networks.variables(host, fact, nccl_devices, folders.state_dir)
        env = environment(
            host,
            fact,
            run_dir=folders.run_dir,
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
                argv=_argv(spec, fact.python, folders, options),
                env={
                    **({variables.PROJECT: spec.project} if spec.script is not None else {}),
                    **env,
                    variables.COLLECTIVE_TIMEOUT_S: f"{cluster.settings.collective_timeout_s:g}",
                },
                run_dir=folders.run_dir,
                data_dir=folders.data_dir,
                state_dir=folders.state_dir,
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
        # not for a script, which may set variables before it imports torch; nor in a container, which a parent would
        # keep after the end of the run
        warm=cluster.settings.warm and spec.script is None and cluster.container is None,
        nodes=tuple(nodes),
        outputs=spec.outputs,
    )


@dataclass(frozen=True, kw_only=True)
class _Folders:
    """Absolute paths on one node: the run folder, the data pack ('' without one), and the agent's own files."""

    run_dir: str
    data_dir: str
    state_dir: str


def _folders(cluster: Cluster, number: int, facts: HostFacts, spec: AttemptSpec, run_id: str) -> _Folders:
    """Return the folders of a run on node ``number``."""
    able = capabilities(cluster)
    if able.shares_run_dir:  # ranks on this computer, or on hosts that share its file system
        state_dir = spec.run_dir / run_folder.ATTEMPTS / str(spec.attempt) / f"agent-{run_id}"
        state_dir = state_dir / f"node{number}" if able.hosts_are_granted else state_dir
        data_dir = str(spec.pack.path) if spec.pack else ""
        return _Folders(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))
    # a folder for each start and node: two hosts may share one home over NFS
    workdir = workdir_of(cluster)
    if workdir == "~" or workdir.startswith("~/"):
        workdir = facts.home + workdir[1:]
    node_dir = f"{workdir}/runs/{run_id}/node{number}"
    data_dir = facts.pack_path or (f"{workdir}/data/{spec.pack.digest}" if spec.pack else "")
    return _Folders(run_dir=node_dir, data_dir=data_dir, state_dir=f"{node_dir}/agent")


def _binds_to_numa_nodes(cluster: Cluster, host: Host, fact: HostFacts) -> bool:
    """Return whether host and torchrun can bind each rank to the cores near its GPU."""
    # ``placement``: CUDA_VISIBLE_DEVICES, by which a sweep gives each of its parallel trials GPUs of its own
    gpus = visible_gpus(fact.gpus, {**host.placement, **host.env})
    release = tuple(int(part) for part in re.findall(r"\d+", fact.torch_version or "")[:2])
    is_able = fact.can_bind_numa and release >= _NUMA_TORCH
    return cluster.device == "cuda" and is_able and host.nproc_per_node <= gpus


def _argv(spec: AttemptSpec, python: str, folders: _Folders, options: Mapping[str, str | int]) -> tuple[str, ...]:
    """Return a node's command: torchrun for the built-in trainer, else a script's parent with its command behind --."""
    config = ("--config", f"{folders.run_dir}/config.json")
    torchrun: tuple[str, ...] = (
        python,
        f"{folders.run_dir}/code/{TORCHRUN_FILE}",
        *(f"--{name}={value}" for name, value in options.items()),
    )
    if spec.script is None:
        return (*torchrun, "-m", spec.trainer, *config)
    paths_in_pack = spec.pack.inside if spec.pack is not None else ()
    data = [word for path in paths_in_pack for word in ("--data", f"{folders.data_dir}/{path}")]
    of_script = ("--script", spec.script, "--node-rank", str(options["node-rank"]), *data)
    if spec.uses_torchrun:
        return (python, "-m", spec.trainer, *config, *of_script, "--", *torchrun)
    # the parent adds the script to the interpreter, and writes the log that torchrun would write
    return (python, "-m", spec.trainer, *config, *of_script, "--log-dir", str(options["log-dir"]), "--", python)


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

    ``one_thread``: a rank gets one thread instead of its share of the cores. ``network``: variables of the network.
    """
    # on CPUs the last bits of a result depend on the number of threads, so it must not depend on the host's cores;
    # ``shared_by`` is the number of runs (trials of a sweep) that use the host at a time
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
    """Return the environment for warm parents, which start during the probe and later fork the ranks.

    None: none are started then, because of a container, hosts that differ, or a configured PYTHONPATH.
    """
    if cluster.container is not None:
        return None
    # All hosts get the same probe, so their settings must be equal. A configured PYTHONPATH decides what Python imports
    # at its start, and can't be set yet: the run's folder, which isn't known before the probe, comes first in it
    # (``environment``). Without a configured one, the parent starts without PYTHONPATH, and its forks add the folder.
    settings = [{**host.placement, **host.env} for host in cluster.hosts]
    ranks = {host.nproc_per_node * host.shared_by for host in cluster.hosts}
    if any(one != settings[0] for one in settings) or len(ranks) > 1 or "PYTHONPATH" in settings[0]:
        return None
    one_thread = cluster.device != "cuda"
    env = {**rank_environment.ALWAYS, **({"OMP_NUM_THREADS": "1"} if one_thread else {}), **settings[0]}
    # 0: the cores aren't divided among ranks, as each has one thread
    return WarmEnvironment(env=env, ranks_per_host=0 if one_thread else ranks.pop())


def _python_path(code: str, configured: str) -> str:
    """Return PYTHONPATH with the run's copy of the code first, so that the hashed code runs. Raises UsageError."""
    if ":" in code:
        raise UsageError(
            f"the run's code would lie in {code}, and PYTHONPATH separates folders by ':'",
            hint="paths.runs=<a folder without ':' in its path>, on hosts cluster.workdir",
        )
    # relative entries are folders of the project, whose modules are in that copy
    return ":".join([code, *(entry for entry in configured.split(":") if entry.startswith("/"))])
