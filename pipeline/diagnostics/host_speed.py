"""The hosts' speeds, compared with each other (`doit preflight --measure`).

trainers.measuring.speeds measures them; the comparison is pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.preflight.judgement import ALL, Check, State
from pipeline.core.specs import Cluster
from pipeline.diagnostics import node_module
from trainers.contract import run_folder


def measure(
    cluster: Cluster, *, backend: str, runs_dir: Path, root: Path, say: node_module.Say
) -> tuple[Path, list[Figure]]:
    """Measure the cluster, and return the folder of the results and the figures of each host and pair.

    Raises:
        HostError, TrainingError, Killed: as a launch does.
    """
    folder = node_module.new_folder(runs_dir, "host-speed")
    result = node_module.run(
        {"strategy": {"backend": backend}}, run_folder.HOST_SPEED, cluster=cluster, folder=folder,
        root=root, say=say,
    )  # fmt: skip
    return folder, figures(result, [host.label for host in cluster.hosts])


# -------------------------------------------------------------------------------------------------- comparisons (pure)
ENOUGH = 0.8  # of the others' median
_LOOK = "doit preflight --deep shows limits, heat and who computes there"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured speed of one host or a pair of hosts.

    Attributes:
        hosts: labels: one, or two.
        what: ``matrix product`` or ``all-reduce``.
        on: what must be equal for figures to be compared: devices, ranks, backend.
        per_s: operations or bytes a second.
    """

    hosts: tuple[str, ...]
    what: str
    on: str
    per_s: float

    def shown(self, per_s: float) -> str:
        """Return a rate with its unit."""
        return f"{per_s / 1e9:,.1f} GFLOP/s" if self.what == "matrix product" else f"{per_s / 1e9:.3f} GB/s"


def figures(result: Mapping[str, Any], labels: Sequence[str]) -> list[Figure]:
    """Return the slowest rank's matrix products of each host, and the bus bandwidth of each group.

    Args:
        result: host_speed.json.
        labels: the hosts' labels by node rank.
    """
    measured = []
    for number, label in enumerate(labels):
        ranks = [rank for rank in result["ranks"] if rank["node_rank"] == number]
        device = ranks[0]["device"].partition(" ")[2] or result["device"]
        on = f"{len(ranks)} × {device}"
        slowest = min(float(rank["flop_per_s"]) for rank in ranks)
        measured.append(Figure(hosts=(label,), what="matrix product", on=on, per_s=slowest))
    for group in result["groups"]:
        hosts = tuple(labels[number] for number in group["nodes"])
        on = f"{group['ranks']} ranks, {result['backend']}"
        measured.append(Figure(hosts=hosts, what="all-reduce", on=on, per_s=float(group["bus_bytes_per_s"])))
    return measured


def checks(measured: Sequence[Figure]) -> Iterator[Check]:
    """Compare each host, and each pair, with the others of its kind."""
    for figure in measured:
        peers = [other.per_s for other in measured if other is not figure and _is_comparable(figure, other)]
        usual = statistics.median(peers) if peers else 0.0
        host, pair = (figure.hosts[0], "") if len(figure.hosts) == 1 else (ALL, f"{' – '.join(figure.hosts)}: ")
        seen = f"{pair}{figure.shown(figure.per_s)}"
        if figure.per_s < ENOUGH * usual:
            wanted = f"at least {ENOUGH:.0%} of the others' {figure.shown(usual)}"
            seen = f"{seen} ({figure.on})"
            yield Check(host=host, name=figure.what, state=State.WARNING, seen=seen, wanted=wanted, hint=_LOOK)
        else:
            yield Check(host=host, name=figure.what, state=State.OK, seen=seen)


def _is_comparable(one: Figure, other: Figure) -> bool:
    return (one.what, one.on, len(one.hosts)) == (other.what, other.on, len(other.hosts))
