"""Whether every host of a cluster can take part, without starting anything there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from pipeline.cluster import host_versions, launchers, leftover, plan
from pipeline.cluster.connecting import connected
from pipeline.core.specs import Cluster, NodeFacts
from pipeline.core.tables import aligned


def check(
    cluster: Cluster,
    *,
    global_batch_size: int,
    backend: str = "auto",
    versions: Mapping[str, str] | None = None,
    runs_dir: Path | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> list[NodeFacts]:
    """The facts of every host. ``versions`` are what the key of a run would hold.

    With ``runs_dir``, that of this project, the hosts remove what nobody needs of attempts that are over; ``on_note``
    is told.

    Raises:
        HostError: lists each host that can't take part, the value seen and the fix.
        UsageError: the ranks can't share the global batch.
    """
    with closing(launchers.create(cluster)) as launcher:
        facts = launcher.probe(None, host_versions.asked(versions or {}))
        for note in leftover.clear(launcher, facts, runs_dir) if runs_dir else ():
            on_note(note)
        plan.validate(cluster, facts, global_batch_size=global_batch_size, backend=backend)
        host_versions.check(facts, versions or {}, cluster.environment)
        return connected(launcher, cluster, facts)[0]


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
