"""The hosts' speeds, compared with their baseline and each other (`doit preflight --measure`).

trainers.measuring.speeds measures them; the comparison is pure.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.preflight.judgement import ALL, Check, State
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.core.specs import Cluster
from pipeline.diagnostics import node_module
from trainers.contract import run_folder

_BASELINE = "baseline.json"
_MENDS = "doit preflight baseline=save"


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


def baseline(runs_dir: Path) -> dict[str, float]:
    """Return ``Figure.key`` → the saved speed; empty: none is. Raises PacelineError: the file is damaged."""
    path = runs_dir / node_module.FOLDER / _BASELINE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path} can't be read: {error}", hint=_MENDS) from error
    wrong = [key for key, value in saved.items() if not _is_figure(key, value)] if isinstance(saved, dict) else [saved]
    if wrong:
        raise PacelineError(
            f"{path} is no baseline: {wrong[0]!r} in it is not the name of a figure with a number from 0", hint=_MENDS
        )
    return {key: float(value) for key, value in saved.items()}


def _is_figure(key: str, value: object) -> bool:
    """True if the key has the form of ``Figure.key``, and the value is a rate."""
    return key.count(" | ") >= 2 and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def save_baseline(runs_dir: Path, measured: Sequence[Figure]) -> Path:
    """Save these figures for later comparisons, in addition to those of other hosts. Raises OSError."""
    path = runs_dir / node_module.FOLDER / _BASELINE
    try:
        kept = baseline(runs_dir)
    except PacelineError:  # a damaged file is replaced
        kept = {}
    write_json(path, {**kept, **{figure.key: figure.per_s for figure in measured}})
    return path


# -------------------------------------------------------------------------------------------------- comparisons (pure)
ENOUGH = 0.8  # of its own baseline, or of the others' median
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

    @property
    def key(self) -> str:
        """The key of the figure in a baseline."""
        return " | ".join([" – ".join(self.hosts), self.what, self.on])

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


def checks(measured: Sequence[Figure], baseline: Mapping[str, float]) -> Iterator[Check]:
    """Compare each figure with its own baseline, and each host with the others.

    Args:
        baseline: ``Figure.key`` → the saved speed.
    """
    for figure in measured:
        before = baseline.get(figure.key)
        if before is not None and figure.per_s < ENOUGH * before:
            yield _slow(figure, State.FAILED, f"at least {ENOUGH:.0%} of its baseline, {figure.shown(before)}")
        else:
            peers = [other.per_s for other in measured if other is not figure and _is_comparable(figure, other)]
            usual = statistics.median(peers) if peers else 0.0
            if figure.per_s < ENOUGH * usual:
                yield _slow(figure, State.WARNING, f"at least {ENOUGH:.0%} of the others' {figure.shown(usual)}")
            else:
                seen = f"{' – '.join(figure.hosts)}: {figure.shown(figure.per_s)}"
                yield Check(host=_host(figure), name=figure.what, state=State.OK, seen=seen)


def _is_comparable(one: Figure, other: Figure) -> bool:
    return (one.what, one.on, len(one.hosts)) == (other.what, other.on, len(other.hosts))


def _host(figure: Figure) -> str:
    return figure.hosts[0] if len(figure.hosts) == 1 else ALL


def _slow(figure: Figure, state: State, wanted: str) -> Check:
    pair = "" if len(figure.hosts) == 1 else f"{' – '.join(figure.hosts)}: "
    seen = f"{pair}{figure.shown(figure.per_s)} ({figure.on})"
    return Check(host=_host(figure), name=figure.what, state=state, seen=seen, wanted=wanted, hint=_LOOK)
