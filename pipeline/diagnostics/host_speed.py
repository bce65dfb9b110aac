"""The hosts' speeds, compared with each other, and the sums of their all-reduces (`doit preflight --measure`).

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
        quantity: ``matrix product`` or ``all-reduce``.
        setup: what must be equal for figures to be compared: devices, ranks, backend.
        per_s: operations or bytes a second.
        wrong_elements: of one sum, which is compared with the right one.
    """

    hosts: tuple[str, ...]
    quantity: str
    setup: str
    per_s: float
    wrong_elements: int = 0

    def shown(self, per_s: float) -> str:
        """Return a rate with its unit."""
        return f"{per_s / 1e9:,.1f} GFLOP/s" if self.quantity == "matrix product" else f"{per_s / 1e9:.3f} GB/s"


def figures(result: Mapping[str, Any], labels: Sequence[str]) -> list[Figure]:
    """Return the slowest rank's matrix products of each host, and the bus bandwidth of each group.

    Args:
        result: host_speed.json.
        labels: the hosts' labels by node rank.
    """
    measured = []
    for node_rank, label in enumerate(labels):
        ranks = [rank for rank in result["ranks"] if rank["node_rank"] == node_rank]
        device = ranks[0]["device"].partition(" ")[2] or result["device"]
        slowest_per_s = min(float(rank["flop_per_s"]) for rank in ranks)
        setup = f"{len(ranks)} × {device}"
        measured.append(Figure(hosts=(label,), quantity="matrix product", setup=setup, per_s=slowest_per_s))
    for group in result["groups"]:
        measured.append(
            Figure(
                hosts=tuple(labels[node_rank] for node_rank in group["nodes"]),
                quantity="all-reduce",
                setup=f"{group['ranks']} ranks, {result['backend']}",
                per_s=float(group["bus_bytes_per_s"]),
                wrong_elements=int(group["wrong_elements"]),
            )
        )
    return measured


def checks(measured: Sequence[Figure]) -> Iterator[Check]:
    """Compare each host, and each pair, with the others of its kind. A wrong sum is a failed check."""
    for figure in measured:
        peers = [other.per_s for other in measured if other is not figure and _is_comparable(figure, other)]
        usual_per_s = statistics.median(peers) if peers else 0.0
        host, pair = (figure.hosts[0], "") if len(figure.hosts) == 1 else (ALL, f"{' – '.join(figure.hosts)}: ")
        seen, wanted, hint = f"{pair}{figure.shown(figure.per_s)}", "", ""
        state = State.OK
        if figure.wrong_elements:
            state, hint = State.FAILED, "the network or a device is faulty"
            seen, wanted = f"{pair}{figure.wrong_elements:,} elements of a sum are wrong", "right sums"
        elif figure.per_s < ENOUGH * usual_per_s:
            state, hint = State.WARNING, _LOOK
            seen, wanted = (
                f"{seen} ({figure.setup})",
                f"at least {ENOUGH:.0%} of the others' {figure.shown(usual_per_s)}",
            )
        yield Check(host=host, name=figure.quantity, state=state, seen=seen, wanted=wanted, hint=hint)


def _is_comparable(figure: Figure, other: Figure) -> bool:
    return (figure.quantity, figure.setup, len(figure.hosts)) == (other.quantity, other.setup, len(other.hosts))
