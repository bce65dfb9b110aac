"""Whether every host of a cluster can take part, without starting anything there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from pipeline.cluster import host_versions, launchers, plan
from pipeline.core.specs import Cluster, NodeFacts
from pipeline.core.tables import aligned


def check(
    cluster: Cluster, *, global_batch_size: int, backend: str = "auto", versions: Mapping[str, str] | None = None
) -> list[NodeFacts]:
    """The facts of every host. ``versions`` are what the key of a run would hold.

    Raises:
        HostError: lists each host that can't take part, the value seen and the fix.
        UsageError: the ranks can't share the global batch.
    """
    with closing(launchers.create(cluster)) as launcher:
        facts = launcher.probe(None, host_versions.asked(versions or {}))
    plan.validate(cluster, facts, global_batch_size=global_batch_size, backend=backend)
    host_versions.check(facts, versions or {}, cluster.environment)
    return facts


def table(facts: Sequence[NodeFacts]) -> str:
    """The facts as aligned text, a host a line."""
    rows = [("host", "address", "interface", "python", "torch", "gpus", "cpus", "memory", "disk free")]
    rows += [
        (
            fact.host,
            fact.address,
            fact.interface or "-",
            fact.python_version,
            fact.torch_version or "-",
            str(fact.gpus),
            str(fact.cpus),
            f"{fact.memory_bytes / 2**30:.1f} GiB",
            f"{fact.disk_free_bytes / 2**30:.1f} GiB",
        )
        for fact in facts
    ]
    return aligned(rows)
