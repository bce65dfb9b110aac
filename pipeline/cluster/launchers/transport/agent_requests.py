"""Requests to the agents about a plan, as data, with what a run claims on its hosts (docs/sharing-hosts.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers import containers
from pipeline.cluster.launchers.base import PackSource, workdir_of
from pipeline.cluster.launchers.settings import SHARE, busy_policy, capabilities
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster, Host, LaunchPlan
from pipeline.keys import rank_environment
from pipeline.runs import journal
from trainers.contract import run_folder

# variables that a host may have set, which then stay
ENV_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG*")
GPU_S = 1.0  # how long a probe waits for nvidia-smi, which takes seconds where no GPU is in use


def probe(
    cluster: Cluster, pack: PackSource | None, modules: Sequence[str], registry: str, gpu_s: float = GPU_S
) -> dict[str, Any]:
    """Return the request for the facts of a host; ``registry`` is the folder there in which agents register."""
    return {
        "do": "probe",
        "workdir": workdir_of(cluster),
        "writes": not capabilities(cluster).shares_run_dir,
        "registry": registry,
        "env_names": ENV_NAMES,
        "env_families": rank_environment.FAMILIES,
        "env_passed": rank_environment.PASSED,
        "modules": modules,
        "python_path": cluster.python_path,
        "pack_digest": pack.digest if pack else "",
        "pack_places": [str(pack.path)] if pack else [],
        "gpu_s": gpu_s if cluster.device == "cuda" else 0.0,
        "container": containers.wanted(cluster),
    }


def start(
    cluster: Cluster, run_request: dict[str, Any], plan: LaunchPlan, run_dir: Path, pack_digest: str
) -> dict[str, Any]:
    """Return the request that starts a run: ``run_request`` with secrets, claims and the rules to hide secrets.

    Args:
        run_request: of the function of that name.
        pack_digest: of the data pack; '': the run needs none.
    """
    hosts = {host.label: host for host in cluster.hosts}
    hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in cluster.hosts))
    prefix = journal.prefix_of_attempt(plan.run_id)
    what = title(run_dir, plan.run_key)
    nodes = [
        {
            **node,
            "env": {**node["env"], **hosts[node["host"]].secrets},
            "claim": claim(cluster, hosts[node["host"]], prefix, what),
        }
        for node in run_request["nodes"]
    ]
    return {
        **run_request,
        "do": "start",
        "pack_digest": pack_digest,
        "nodes": nodes,
        "hide": rules(hidden),
        "stage": not capabilities(cluster).shares_run_dir,
    }


def run_request(cluster: Cluster, plan: LaunchPlan, registry: str, slow_s: float) -> dict[str, Any]:
    """Return what the requests start, follow, collect and clean have in common.

    Every host gets the parts of all nodes, and finds its own by its identity.
    """
    return {
        **start_facts(plan, registry, keeps_run_dir=capabilities(cluster).shares_run_dir),
        "warm": plan.warm,
        "slow_s": slow_s,
        "rendezvous": [plan.master_addr, plan.master_port] if plan.nnodes > 1 else None,
        "env_passed": rank_environment.IN_CONTAINER if cluster.container else rank_environment.PASSED,
    }


def start_facts(plan: LaunchPlan, registry: str, *, keeps_run_dir: bool) -> dict[str, Any]:
    """Return what an agent needs to know of a start, with or without a scheduler.

    Args:
        plan: what is started.
        registry: the folder there in which agents register.
        keeps_run_dir: the nodes share the run folder with this computer, so only the agent's own files are removed.
    """
    return {
        "run_key": plan.run_key,
        "run_id": plan.run_id,
        "attempts": journal.prefix_of_attempt(plan.run_id),
        "lease_s": plan.lease_s,
        "registry": registry,
        "nodes": [
            {**dataclasses.asdict(node), "remove": [node.state_dir if keeps_run_dir else node.run_dir]}
            for node in plan.nodes
        ],
    }


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


def claim(cluster: Cluster, host: Host, attempts: str, what: str) -> dict[str, Any]:
    """Return a run's claim on a host, as the agent takes it (``claim_devices`` in agent/running/claims.py)."""
    return {
        "resources": resources(host, cluster.device),
        "attempts": attempts,
        "group": group(),
        "what": what,
        "alone": busy_policy(cluster) != SHARE,
    }


def title(run_dir: Path, run_key: str) -> str:
    """Return the words by which other users of a host recognize a run: ``run KEY (small_cnn)``."""
    model = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
        model = f" ({config['model']['name']})"
    return f"run {run_key}{model}"
