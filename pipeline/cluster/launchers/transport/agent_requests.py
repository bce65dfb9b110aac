"""What agents are asked to do with a plan: requests as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.base import PackSource, workdir_of
from pipeline.cluster.launchers.settings import capabilities
from pipeline.cluster.launchers.transport import claims
from pipeline.cluster.networks import tls_files
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.keys import rank_environment
from pipeline.runs import journal

ENV_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG*")  # what a host has set, stays
GPU_S = 1.0  # how long a probe waits for nvidia-smi, which takes seconds where no GPU is in use


def probe(cluster: Cluster, pack: PackSource | None, modules: Sequence[str], registry: str) -> dict[str, Any]:
    """Asks for the facts of a host; ``registry`` is the folder there in which agents register."""
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
        "certificates": tls_files(cluster),
        "gpu_s": GPU_S if cluster.device == "cuda" else 0.0,
    }


def start(cluster: Cluster, run: dict[str, Any], plan: LaunchPlan, run_dir: Path, digest: str) -> dict[str, Any]:
    """``run`` (of ``of_run``) with what ``start`` alone carries: the nodes with their secret variables, what the run
    claims there, and what hides the secrets in their output.

    Args:
        digest: of the data pack; '': the run needs none.
    """
    hosts = {host.label: host for host in cluster.hosts}
    hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in cluster.hosts))
    prefix, what = journal.prefix_of_attempt(plan.run_id), claims.title(run_dir, plan.run_key)
    nodes = [
        {
            **node,
            "env": {**node["env"], **hosts[node["host"]].secrets},
            "claim": claims.claim(cluster, hosts[node["host"]], prefix, what),
        }
        for node in run["nodes"]
    ]
    stage = not capabilities(cluster).shares_run_dir
    return {**run, "do": "start", "pack_digest": digest, "nodes": nodes, "hide": rules(hidden), "stage": stage}


def of_run(cluster: Cluster, plan: LaunchPlan, registry: str, slow_s: float) -> dict[str, Any]:
    """What start, follow, collect and clean all carry: every node's part, found there by identity."""
    return {
        "run_key": plan.run_key,
        "run_id": plan.run_id,
        "attempts": journal.prefix_of_attempt(plan.run_id),
        "lease_s": plan.lease_s,
        "warm": plan.warm,
        "slow_s": slow_s,
        "meeting": [plan.master_addr, plan.master_port] if _nodes_meet(cluster, plan) else None,
        "registry": registry,
        "env_passed": rank_environment.PASSED,
        "nodes": [
            {**dataclasses.asdict(node), "remove": [_removed(cluster, node.run_dir, node.state_dir)]}
            for node in plan.nodes
        ],
    }


def _nodes_meet(cluster: Cluster, plan: LaunchPlan) -> bool:
    """Whether torchrun of each node waits for the others at one address."""
    return plan.nnodes > 1 and cluster.rendezvous != "file"


def _removed(cluster: Cluster, run_dir: str, state_dir: str) -> str:
    """The folder that ``clean`` removes on a node."""
    return state_dir if capabilities(cluster).shares_run_dir else run_dir
