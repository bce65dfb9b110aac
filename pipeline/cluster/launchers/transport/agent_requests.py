"""Requests to the agents, made of cluster and plan, with what a run claims on its hosts (docs/sharing-hosts.md)."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipeline.cluster.agent.requests import ClaimRequest, NodeStart, ProbeRequest, StartRequest, WarmEnvironment
from pipeline.cluster.launchers import containers
from pipeline.cluster.launchers.base import PackSource, workdir_of
from pipeline.cluster.launchers.settings import SHARE, busy_policy, capabilities
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster, Host, LaunchPlan
from pipeline.keys import rank_environment
from pipeline.runs import journal
from trainers.contract import run_folder
from trainers.contract.host_facts import Container
from trainers.contract.records import from_json

# variables that a host may have set, which then stay
ENV_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG*")
GPU_S = 1.0  # how long a probe waits for nvidia-smi, which takes seconds where no GPU is in use


def probe(
    cluster: Cluster,
    pack: PackSource | None,
    modules: Sequence[str],
    registry: str,
    gpu_s: float = GPU_S,
    warm: WarmEnvironment | None = None,
) -> ProbeRequest:
    """Return the request for the facts of a host; ``registry`` is the folder there in which agents register."""
    return ProbeRequest(
        workdir=workdir_of(cluster),
        registry=registry,
        tests_writing=not capabilities(cluster).shares_run_dir,
        env_names=ENV_NAMES,
        env_families=tuple(rank_environment.FAMILIES),
        env_passed=tuple(rank_environment.PASSED),
        modules=tuple(modules),
        python_path=tuple(cluster.python_path),
        pack_digest=pack.digest if pack else "",
        pack_folders=(str(pack.path),) if pack else (),
        gpu_s=gpu_s if cluster.device == "cuda" else 0.0,
        container=containers.requested(cluster),
        warm=warm,
    )


def start(
    cluster: Cluster, plan: LaunchPlan, run_dir: Path, pack_digest: str, registry: str, slow_s: float
) -> StartRequest:
    """Return the request that starts a run, with secrets, claims and the rules that mask secrets.

    Args:
        pack_digest: of the data pack; '': the run needs none.
        registry: the folder there in which agents register.
        slow_s: how much longer than usual a login may take.
    """
    hosts = {host.label: host for host in cluster.hosts}
    hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in cluster.hosts))
    request = start_in_job(plan, registry, keeps_run_dir=capabilities(cluster).shares_run_dir)
    nodes = [
        node._replace(
            env={**node.env, **hosts[node.host].secrets},
            claim=claim(cluster, hosts[node.host], request.attempt_prefix, title(run_dir, plan.run_key)),
        )
        for node in request.nodes
    ]
    return request._replace(
        nodes=tuple(nodes),
        env_passed=tuple(rank_environment.IN_CONTAINER if cluster.container else rank_environment.PASSED),
        masking_rules=rules(hidden),
        rendezvous=(plan.master_addr, plan.master_port) if plan.nnodes > 1 else None,
        pack_digest=pack_digest,
        sends_files=not capabilities(cluster).shares_run_dir,
        uses_warm_parent=plan.warm,
        slow_s=slow_s,
    )


def start_in_job(plan: LaunchPlan, registry: str, *, keeps_run_dir: bool) -> StartRequest:
    """Return the start of a plan without secrets, claims and masking rules, as a scheduler's job gets it.

    Args:
        registry: the folder there in which agents register.
        keeps_run_dir: the nodes share the run folder with this computer, so only the agent's own files are removed.
    """
    parts = zip(nodes_of(plan, keeps_run_dir=keeps_run_dir), plan.nodes, strict=True)
    return StartRequest(
        run_key=plan.run_key,
        run_id=plan.run_id,
        attempt_prefix=journal.prefix_of_attempt(plan.run_id),
        registry=registry,
        lease_s=plan.lease_s,
        nodes=tuple(
            part._replace(
                nproc_per_node=node.nproc_per_node,
                argv=node.argv,
                env=dict(node.env),
                data_dir=node.data_dir,
                container=None if node.container is None else from_json(Container, dict(node.container)),
            )
            for part, node in parts
        ),
    )


def nodes_of(plan: LaunchPlan, *, keeps_run_dir: bool) -> tuple[NodeStart, ...]:
    """Return the nodes of a start without what only the start itself needs; every host finds its own part in them."""
    return tuple(
        NodeStart(
            host=node.host,
            identity=node.identity,
            node_rank=node.node_rank,
            first_rank=node.first_rank,
            run_dir=node.run_dir,
            state_dir=node.state_dir,
            own_folders=(node.state_dir if keeps_run_dir else node.run_dir,),
        )
        for node in plan.nodes
    )


def resources(host: Host, device: str) -> list[str]:
    """Return what a host's ranks compute on: ``gpu:0``, …, or ``cpu``."""
    if device != "cuda":
        return ["cpu"]
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(host.nproc_per_node)] if chosen is None else chosen.split(",")
    return [f"gpu:{name.strip()}" for name in names[: host.nproc_per_node] if name.strip()]


@cache
def group() -> str:
    """Return the mark of this process, whose runs don't refuse each other: a sweep arranges its trials itself."""
    return secrets.token_hex(8)


def claim(cluster: Cluster, host: Host, attempt_prefix: str, title: str) -> ClaimRequest:
    """Return a run's claim on a host."""
    return ClaimRequest(
        resources=tuple(resources(host, cluster.device)),
        attempt_prefix=attempt_prefix,
        group=group(),
        title=title,
        refuses_others=busy_policy(cluster) != SHARE,
    )


def title(run_dir: Path, run_key: str) -> str:
    """Return the words by which other users of a host recognize a run: ``run KEY (small_cnn)``."""
    model = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
        model = f" ({config['model']['name']})"
    return f"run {run_key}{model}"
