"""What can be said of a cluster before any host is asked: it can't work, or it will be slow."""

from __future__ import annotations

from pathlib import Path

from pipeline import lab
from pipeline.cluster.agent.host.hardware import count_cpus
from pipeline.cluster.launchers import capabilities
from pipeline.cluster.validation import visible_gpus
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted

_MAX_RANKS_PER_CORE = 2  # more than this is worth a warning


def check_cluster(cluster: Cluster, *, root: Path, local_gpus: int) -> str:
    """Return a warning, or ''. Raises UsageError: no GPU here, or the lab isn't up."""
    if not capabilities(cluster).is_this_computer:
        refuse_without_lab(cluster, root)
        return ""
    (host,) = cluster.hosts
    gpus = visible_gpus(local_gpus, host.env)
    if cluster.device == "cuda" and not gpus:
        raise UsageError(
            "cluster.device=cuda: this computer has no GPU that CUDA may see",
            hint="cluster.device=cpu, or a cluster that has GPUs: cluster=pssh cluster.hosts=[HOST]",
        )
    ranks, cores = host.nproc_per_node, count_cpus()
    if cluster.device == "cuda" or ranks <= _MAX_RANKS_PER_CORE * cores:
        return ""
    return (
        f"WARNING: {ranks} ranks on {counted(cores, 'core')}: they wait for each other; "
        f"cluster.nproc_per_node={cores} is faster"
    )


def refuse_without_lab(cluster: Cluster, root: Path) -> None:
    """Raise UsageError if the hosts are those of this project's lab and it isn't up."""
    config = cluster.ssh_config
    if config is None or Path(config).resolve() != (root / ".lab" / "ssh_config").resolve():
        return
    lab_status = lab.status(root)
    if lab_status is None or not lab_status.running:
        state, hosts = ("isn't up", cluster.hosts) if lab_status is None else ("is down", lab_status.hosts)
        raise UsageError(
            f"the lab of this project {state}, and {config} names its hosts",
            hint=f"doit lab --hosts {len(hosts)}; or hosts of your own: cluster=pssh cluster.hosts=[HOST1,HOST2]",
        )
