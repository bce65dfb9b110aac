"""`doit benchmark`: the configured training on one rank, more ranks, more hosts, against a plain PyTorch loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


def settings(options: Mapping[str, str]) -> dict[str, Any]:
    """Return ``pairs`` and ``block_s`` as far as they were typed, as numbers. Raises UsageError."""
    parsed: dict[str, Any] = {**node_module.whole_numbers(options, "pairs")}
    if "block_s" in options:
        try:
            parsed["block_s"] = float(options["block_s"])
        except ValueError:
            parsed["block_s"] = 0.0
        if not 0 < parsed["block_s"] < 3600:
            raise UsageError(f"block_s={options['block_s']} must be a number of seconds above 0")
    return parsed


def measure(
    config: RunConfig, pack: PackSource, *, options: Mapping[str, str], root: Path, say: node_module.Say
) -> tuple[Path, dict[str, Any]]:
    """Measure all points of the scaling table; return the folder of the results and the content of benchmark.json.

    Raises:
        UsageError: an option that makes no sense, or no number of ranks that can share the global batch.
        HostError, TrainingError, Killed: as a launch does; the points measured before stay in their folders.
    """
    given = settings(options)
    clusters, left_out = points(config.cluster, config.train.trainer.global_batch_size)
    folder = node_module.new_folder(config.runs_dir, "benchmark")
    settings_of_run = {**config.resolved, "init": {}, "measure": given}  # a measurement needs no initial weights

    def point(number: int, cluster: Cluster) -> dict[str, Any]:
        nodes, ranks = cluster.nnodes, cluster.world_size
        say(f"\n{number} of {len(clusters)}: {counted(nodes, 'host')}, {counted(ranks, 'rank')}")
        part = folder / f"{folder.name}-{nodes}x{ranks}"
        result = node_module.run(
            settings_of_run, run_folder.THROUGHPUT, cluster=cluster, folder=part, root=root, say=say,
            pack=pack, chosen=config.chosen,
        )  # fmt: skip
        return {**result, "hosts": [host.label for host in cluster.hosts]}

    measured = [point(number, cluster) for number, cluster in enumerate(clusters, start=1)]
    whole = {
        "version": 1,
        "unix_time": time.time(),
        "commit": _commit(config, root),
        "overrides": list(config.overrides),
        "launcher": config.cluster.launcher,
        "left_out": left_out,
        "points": measured,
    }
    write_json(folder / RESULT, whole)
    return folder, whole


def _commit(config: RunConfig, root: Path) -> str:
    """Return the commit that is measured."""
    run = {"overrides": (), "hosts": (), "data_digest": "", "unix_time": time.time()}
    origin, _ = provenance.collect(root, (), run, outputs=[config.runs_dir, config.data_dir])
    if origin.git_commit is None:
        return "unknown"
    return f"{origin.git_commit[:10]}{'-dirty' if origin.git_dirty else ''}"


# ------------------------------------------------------------------------------- points and tables (pure)
_ALL_UP_TO = 4  # every count up to here, beyond it the powers of two and the last


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point. Rates are images per second over all ranks; ``scaling`` is against the first point.

    ``plain`` is the rate of the reference loop, ``ratio`` Paceline's rate divided by it; ``n`` is the number of pairs.
    """

    nodes: int
    ranks: int
    threads: int
    n: int
    rate: float
    rate_min: float
    rate_max: float
    plain: float
    ratio: float
    ratio_min: float
    ratio_max: float
    scaling: float
    flop_per_s: float
    peak_share: float | None


def points(cluster: Cluster, global_batch_size: int) -> tuple[list[Cluster], list[str]]:
    """Return 1…N ranks on the first host, then 1…M hosts with all their ranks; and what was left out, with the reason.

    Raises:
        UsageError: none of them can share the global batch.
    """
    first = cluster.hosts[0]
    clusters = [
        replace(cluster, hosts=(replace(first, nproc_per_node=ranks),)) for ranks in _counts(first.nproc_per_node)
    ]
    clusters += [replace(cluster, hosts=cluster.hosts[:hosts]) for hosts in _counts(cluster.nnodes) if hosts > 1]
    good = [one for one in clusters if global_batch_size % one.world_size == 0]
    left_out = [
        f"{counted(one.nnodes, 'host')} with {counted(one.world_size, 'rank')}: "
        f"they can't share a global batch of {global_batch_size}"
        for one in clusters
        if one not in good
    ]
    if not good:
        raise UsageError("\n".join(["nothing can be measured:", *left_out]), hint="another trainer.global_batch_size")
    return good, left_out


def _counts(last: int) -> list[int]:
    if last <= _ALL_UP_TO:
        return list(range(1, last + 1))
    powers = [1 << exponent for exponent in range(last.bit_length()) if 1 << exponent < last]
    return [*powers, last]


def rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the figures of benchmark.json's points, in their order."""
    table_rows: list[Row] = []
    for result in results:
        own = [pair["paceline_images_per_s"] for pair in result["pairs"]]
        plain = [pair["plain_images_per_s"] for pair in result["pairs"]]
        ratios = [a / b for a, b in zip(own, plain, strict=True)]
        rate, peak = statistics.median(own), result["hardware"]["peak_flop_per_s"]
        flop_per_s = rate * result["flop_per_image"]
        table_rows.append(
            Row(
                nodes=result["nnodes"],
                ranks=result["world_size"],
                threads=result["hardware"]["threads"],
                n=len(own),
                rate=rate,
                rate_min=min(own),
                rate_max=max(own),
                plain=statistics.median(plain),
                ratio=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
                scaling=rate / table_rows[0].rate if table_rows else 1.0,
                flop_per_s=flop_per_s,
                peak_share=flop_per_s / (peak * result["world_size"]) if peak else None,
            )
        )
    return table_rows


def table(whole: Mapping[str, Any]) -> str:
    """Format benchmark.json for a terminal."""
    results = whole["points"]
    first = results[0]
    hardware = first["hardware"]
    lines = [
        f"{first['model']} ({first['parameters']:,} parameters) on {first['dataset']}, {first['precision']}, "
        f"global batch {first['global_batch_size']}",
        f"{hardware['name']}; torch {hardware['torch']}, {first['backend']}; commit {whole['commit']}",
        "",
        *_throughput(rows(results)),
        "",
        *(f"left out: {text}" for text in whole["left_out"]),
        *_notes(first),
    ]
    return "\n".join(lines)


def _throughput(table_rows: Sequence[Row]) -> list[str]:
    lines = [
        "images/s over all ranks; the reference loop took turns with Paceline, block by block",
        f"{'hosts':>5}{'ranks':>6}{'threads':>8}{'median':>11}{'min':>11}{'max':>11}{'n':>4}{'scaling':>9}"
        f"{'reference loop':>16}  {'ratio (min – max)':<20}{'TFLOP/s':>9}{'of peak':>9}",
    ]
    for row in table_rows:
        ratio = f"{row.ratio:.3f} ({row.ratio_min:.3f} – {row.ratio_max:.3f})"
        share = "–" if row.peak_share is None else f"{row.peak_share:.1%}"
        lines.append(
            f"{row.nodes:>5}{row.ranks:>6}{row.threads:>8}{row.rate:>11,.1f}{row.rate_min:>11,.1f}{row.rate_max:>11,.1f}"
            f"{row.n:>4}{row.scaling:>9.2f}{row.plain:>16,.1f}  {ratio:<20}{row.flop_per_s / 1e12:>9.3f}{share:>9}"
        )
    return lines


def _notes(first: Mapping[str, Any]) -> list[str]:
    lines = []
    if first["hardware"]["peak_flop_per_s"] is None:
        lines.append(f"share of the peak is left out: no peak is known for {first['hardware']['name']}")
    if first["hardware"]["device"] == "cpu":
        lines.append("ranks on one computer share its cores (threads: what each rank was given)")
    if first["synthetic"]:
        lines.append("SYNTHETIC DATA: the speed counts, an accuracy would not")
    return lines
