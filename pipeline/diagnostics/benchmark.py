"""`doit benchmark`: the configured training on one rank, more ranks, more hosts, against a plain PyTorch loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.core.errors import UsageError
from pipeline.core.files import write_json
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.diagnostics import node_module
from pipeline.runs import provenance
from trainers.contract import run_folder

RESULT = "benchmark.json"
_ALL_UP_TO = 4  # ranks or hosts: every number up to here is measured, beyond it the powers of two and the last


@dataclass(frozen=True, kw_only=True)
class Point:
    """The measurement of one number of hosts and ranks.

    Attributes:
        own_per_s: images a second of Paceline's loop over all ranks, one figure a block.
        reference_per_s: the same of the plain PyTorch loop; its blocks alternate with those of Paceline's.
        threads: of each rank.
        peak_flop_per_s: of one rank's hardware; None: unknown.
    """

    model: str
    parameters: int
    dataset: str
    synthetic: bool
    precision: str
    global_batch_size: int
    backend: str
    nnodes: int
    world_size: int
    device: str
    hardware: str
    torch: str
    threads: int
    peak_flop_per_s: float | None
    flop_per_image: float
    own_per_s: Sequence[float]
    reference_per_s: Sequence[float]

    @classmethod
    def from_json(cls, throughput: Mapping[str, Any]) -> Point:
        """Return the point of a throughput.json (trainers.measuring.throughput)."""
        hardware, pairs = throughput["hardware"], throughput["pairs"]
        same_names = (
            *("model", "parameters", "dataset", "synthetic", "precision", "global_batch_size", "backend"),
            *("nnodes", "world_size", "flop_per_image"),
        )
        return cls(
            **{name: throughput[name] for name in same_names},
            **{name: hardware[name] for name in ("device", "torch", "threads", "peak_flop_per_s")},
            hardware=hardware["name"],
            own_per_s=[pair["paceline_images_per_s"] for pair in pairs],
            reference_per_s=[pair["plain_images_per_s"] for pair in pairs],
        )

    @property
    def images_per_s(self) -> float:
        """The median of Paceline's blocks."""
        return statistics.median(self.own_per_s)

    @property
    def ratios(self) -> list[float]:
        """Paceline's speed divided by that of the reference loop, pair of blocks by pair."""
        return [own / reference for own, reference in zip(self.own_per_s, self.reference_per_s, strict=True)]

    @property
    def flop_per_s(self) -> float:
        return self.images_per_s * self.flop_per_image

    @property
    def peak_share(self) -> float | None:
        """The reached part of all ranks' peak; None: no peak is known."""
        peak = self.peak_flop_per_s
        return self.flop_per_s / (peak * self.world_size) if peak else None


class Benchmark(NamedTuple):
    """All points, the first one with one rank; ``left_out``: what could not be measured, with the reason."""

    folder: Path
    commit: str
    points: Sequence[Point]
    left_out: Sequence[str]


def measure(
    config: RunConfig, pack: PackSource, *, settings: Mapping[str, float], root: Path, say: node_module.Say
) -> Benchmark:
    """Measure all points of the scaling table, and write benchmark.json.

    Args:
        settings: ``pairs`` and ``block_s`` (seconds), as far as they were typed.

    Raises:
        UsageError: no number of ranks can share the global batch.
        HostError, TrainingError, Killed: as a launch does; the points measured before stay in their folders.
    """
    clusters, left_out = clusters_to_measure(config.cluster, config.train.trainer.global_batch_size)
    folder = node_module.new_folder(config.runs_dir, "benchmark")
    request = {**config.resolved, "init": {}, "measure": settings}  # a measurement needs no initial weights
    results: list[dict[str, Any]] = []
    for number, cluster in enumerate(clusters, start=1):
        nodes, ranks = cluster.nnodes, cluster.world_size
        say(f"\n{number} of {len(clusters)}: {counted(nodes, 'host')}, {counted(ranks, 'rank')}")
        result = node_module.run(
            request,
            run_folder.THROUGHPUT,
            cluster=cluster,
            folder=folder / f"{folder.name}-{nodes}x{ranks}",
            root=root,
            say=say,
            pack=pack,
            chosen=config.chosen,
        )
        results.append({**result, "hosts": [host.label for host in cluster.hosts]})
    commit = _commit(config, root)
    content = {
        "version": 1,
        "unix_time": time.time(),
        "commit": commit,
        "overrides": list(config.overrides),
        "launcher": config.cluster.launcher,
        "left_out": left_out,
        "points": results,
    }
    write_json(folder / RESULT, content)
    return Benchmark(folder, commit, [Point.from_json(result) for result in results], left_out)


def _commit(config: RunConfig, root: Path) -> str:
    """Return the commit that is measured."""
    run = {"overrides": (), "hosts": (), "data_digest": "", "unix_time": time.time()}
    origin, _ = provenance.collect(root, (), run, outputs=[config.runs_dir, config.data_dir])
    if origin.git_commit is None:
        return "unknown"
    return f"{origin.git_commit[:10]}{'-dirty' if origin.git_dirty else ''}"


# ------------------------------------------------------------------------------- clusters and tables (pure)
def clusters_to_measure(cluster: Cluster, global_batch_size: int) -> tuple[list[Cluster], list[str]]:
    """Return 1…N ranks on the first host, then 1…M hosts with all their ranks; and what was left out, with the reason.

    Raises:
        UsageError: none of them can share the global batch.
    """
    first = cluster.hosts[0]
    clusters = [
        replace(cluster, hosts=(replace(first, nproc_per_node=ranks),)) for ranks in _counts(first.nproc_per_node)
    ]
    clusters += [replace(cluster, hosts=cluster.hosts[:hosts]) for hosts in _counts(cluster.nnodes) if hosts > 1]
    even = [part for part in clusters if global_batch_size % part.world_size == 0]
    left_out = [
        f"{counted(part.nnodes, 'host')} with {counted(part.world_size, 'rank')}: "
        f"they can't share a global batch of {global_batch_size}"
        for part in clusters
        if part not in even
    ]
    if not even:
        raise UsageError("\n".join(["nothing can be measured:", *left_out]), hint="another trainer.global_batch_size")
    return even, left_out


def _counts(last: int) -> list[int]:
    if last <= _ALL_UP_TO:
        return list(range(1, last + 1))
    powers = [1 << exponent for exponent in range(last.bit_length()) if 1 << exponent < last]
    return [*powers, last]


def table(benchmark: Benchmark) -> str:
    """Format the points for a terminal."""
    first = benchmark.points[0]
    lines = [
        f"{first.model} ({first.parameters:,} parameters) on {first.dataset}, {first.precision}, "
        f"global batch {first.global_batch_size}",
        f"{first.hardware}; torch {first.torch}, {first.backend}; commit {benchmark.commit}",
        "",
        "images/s over all ranks; the reference loop took turns with Paceline, block by block",
        f"{'hosts':>5}{'ranks':>6}{'threads':>8}{'median':>11}{'min':>11}{'max':>11}{'n':>4}{'scaling':>9}"
        f"{'reference loop':>16}  {'ratio (min – max)':<20}{'TFLOP/s':>9}{'of peak':>9}",
        *(_row(point, first) for point in benchmark.points),
        "",
        *(f"left out: {text}" for text in benchmark.left_out),
    ]
    if first.peak_flop_per_s is None:
        lines.append(f"share of the peak is left out: no peak is known for {first.hardware}")
    if first.device == "cpu":
        lines.append("ranks on one computer share its cores (threads: what each rank was given)")
    if first.synthetic:
        lines.append("SYNTHETIC DATA: the speed counts, an accuracy would not")
    return "\n".join(lines)


def _row(point: Point, first: Point) -> str:
    """Return a line of the table; the scaling is against the ``first`` point."""
    own, ratios = point.own_per_s, point.ratios
    scaling, reference = point.images_per_s / first.images_per_s, statistics.median(point.reference_per_s)
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})"
    peak_share = "–" if point.peak_share is None else f"{point.peak_share:.1%}"
    return (
        f"{point.nnodes:>5}{point.world_size:>6}{point.threads:>8}{point.images_per_s:>11,.1f}{min(own):>11,.1f}"
        f"{max(own):>11,.1f}{len(own):>4}{scaling:>9.2f}{reference:>16,.1f}  {ratio:<20}"
        f"{point.flop_per_s / 1e12:>9.3f}{peak_share:>9}"
    )
