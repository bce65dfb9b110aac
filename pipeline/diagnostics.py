"""Measurements on the hosts, launched like runs (the ranks run trainers.measuring); results lie in runs/diagnostics/.

`doit preflight --measure` compares the speeds of hosts, `doit benchmark` the throughputs of one rank and of more."""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import AllSucceeded, AttemptEvent, Doing, Emit, HostNote, Notice, ShownLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import AttemptSpec, PackSource
from pipeline.cluster.preflight.judgement import ALL, Check, State
from pipeline.config.build import RunConfig
from pipeline.core.errors import TrainingError, UsageError
from pipeline.core.files import write_atomic, write_json
from pipeline.core.processes.threads import WaitReports
from pipeline.core.program import TORCHRUN
from pipeline.core.specs import Cluster, LaunchPlan, Outputs
from pipeline.core.tables import counted
from pipeline.data import manifest
from pipeline.keys.import_closure import import_closure
from pipeline.runs import provenance
from trainers.contract import run_folder

FOLDER = "diagnostics"  # in the folder of runs
_ENTRY = "trainers.measuring.measure"

Say = Callable[[str], None]


def new_folder(runs_dir: Path, measurement: str) -> Path:
    """Create and return ``runs/diagnostics/<local time>-<measurement>``. Raises OSError."""
    start = runs_dir / FOLDER / time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = start.with_name(f"{start.name}-{measurement}{'' if number == 1 else f'-{number}'}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def run(
    config: Mapping[str, Any],
    result: str,
    *,
    cluster: Cluster,
    folder: Path,
    root: Path,
    say: Say,
    pack: PackSource | None = None,
    other_results: tuple[str, ...] = (),
    chosen: Collection[str] = (),
) -> dict[str, Any]:
    """Run trainers.measuring.measure on all ranks; return the JSON of the file ``result``.

    Args:
        config: for config.json, which the ranks read.
        other_results: files that are fetched too, if they are there.
        chosen: the modules of options (model, optimizer, …) whose code the ranks need.

    Raises HostError, TrainingError, Killed.
    """
    write_json(folder / run_folder.CONFIG, config)
    pack_manifest = manifest.read(pack.path) if pack is not None else None
    reading_modules = pack_manifest.rank_modules if pack_manifest is not None else ()
    entries = (_ENTRY, TORCHRUN, *chosen, *reading_modules)
    code = import_closure(root, entries, cluster.python_path, may_lack=True)
    for name, source in code.sources.items():
        write_atomic(folder / "code" / name, source.read_bytes())
    spec = AttemptSpec(
        run_dir=folder.resolve(),
        # random, because starts of one key on a host end each other: two users may measure at the same second
        run_key=f"{folder.name}-{secrets.token_hex(3)}",
        attempt=1,
        trainer=_ENTRY,
        pack=pack,
        outputs=Outputs(final=(*other_results, result), needed=(result,)),
    )
    with WaitReports(say) as reports:
        reports.doing("asking the hosts")
        run_attempt(spec, closing(Hosts(cluster)), _shown_by(reports))
    try:
        value: dict[str, Any] = json.loads((folder / result).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"every rank ended well, but {folder / result} is not readable: {error}") from error
    return value


def _shown_by(say: WaitReports) -> Emit:
    """Return the receiver of an attempt's events, which shows what users need of them."""

    def show(event: AttemptEvent) -> None:
        match event:
            case ShownLine(line=line):
                say(line.text if line.rank == 0 else f"{line.host}:{line.rank} | {line.text}")
            case HostNote(text=text) | Notice(text=text):
                say(text)
            case Doing(what=what) if what is not None:
                say.doing(what)
            case LaunchPlan() | Doing():
                say.doing("measuring on the hosts, whose ranks import torch first")
            case AllSucceeded():
                say.doing("fetching the results")

    return show


def measure_hosts(cluster: Cluster, *, backend: str, runs_dir: Path, root: Path, say: Say) -> tuple[Path, list[Speed]]:
    """Measure all hosts; return the folder of the results, and the speed of each host and pair. Raises as ``run``."""
    folder = new_folder(runs_dir, "host-speed")
    config = {"strategy": {"backend": backend}}
    result = run(config, run_folder.HOST_SPEED, cluster=cluster, folder=folder, root=root, say=say)
    return folder, speeds(result, [host.label for host in cluster.hosts])


# -------------------------------------------------------------------------------------------------- comparisons (pure)
ENOUGH = 0.8  # a warning below this share of the others' median
_LOOK = "doit preflight --deep shows limits, heat and who computes there"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A speed of one host or a pair of hosts."""

    hosts: tuple[str, ...]
    quantity: str  # ``matrix product`` or ``all-reduce``
    setup: str  # ranks and device, or ranks and backend; only speeds of equal setups are compared
    per_s: float  # operations or bytes a second
    wrong_elements: int = 0  # in the sums of all-reduces

    def formatted(self, per_s: float) -> str:
        """Return a speed (this one, or one to compare with) in this quantity's unit."""
        return f"{per_s / 1e9:,.1f} GFLOP/s" if self.quantity == "matrix product" else f"{per_s / 1e9:.3f} GB/s"


def speeds(result: Mapping[str, Any], labels: Sequence[str]) -> list[Speed]:
    """Return the speed of each host's slowest rank in matrix products, and each pair's bandwidth of all-reduces.
    ``result``: the content of host_speed.json. ``labels``: the hosts by node rank."""
    measured = []
    for node_rank, label in enumerate(labels):
        ranks = [rank for rank in result["ranks"] if rank["node_rank"] == node_rank]
        device = ranks[0]["device"].partition(" ")[2] or result["device"]  # "cuda:0 NVIDIA H100" → "NVIDIA H100"
        slowest_per_s = min(float(rank["flop_per_s"]) for rank in ranks)
        setup = f"{len(ranks)} × {device}"
        measured.append(Speed(hosts=(label,), quantity="matrix product", setup=setup, per_s=slowest_per_s))
    for group in result["groups"]:
        measured.append(
            Speed(
                hosts=tuple(labels[node_rank] for node_rank in group["nodes"]),
                quantity="all-reduce",
                setup=f"{group['ranks']} ranks, {result['backend']}",
                per_s=float(group["bus_bytes_per_s"]),
                wrong_elements=int(group["wrong_elements"]),
            )
        )
    return measured


def checks(measured: Sequence[Speed]) -> Iterator[Check]:
    """Compare each speed with the others of its kind; a much slower one is a warning, a wrong sum a failed check."""
    for speed in measured:
        kind = (speed.quantity, speed.setup, len(speed.hosts))
        alike = [other for other in measured if (other.quantity, other.setup, len(other.hosts)) == kind]
        peers = [other.per_s for other in alike if other is not speed]
        usual_per_s = statistics.median(peers) if peers else 0.0
        host, pair = (speed.hosts[0], "") if len(speed.hosts) == 1 else (ALL, f"{' – '.join(speed.hosts)}: ")
        seen, wanted, hint = f"{pair}{speed.formatted(speed.per_s)}", "", ""
        state = State.OK
        if speed.wrong_elements:
            state, hint = State.FAILED, "the network or a device is faulty"
            seen, wanted = f"{pair}{speed.wrong_elements:,} elements of a sum are wrong", "right sums"
        elif speed.per_s < ENOUGH * usual_per_s:
            state, hint = State.WARNING, _LOOK
            seen = f"{seen} ({speed.setup})"
            wanted = f"at least {ENOUGH:.0%} of the others' {speed.formatted(usual_per_s)}"
        yield Check(host=host, name=speed.quantity, state=state, seen=seen, wanted=wanted, hint=hint)


BENCHMARK = "benchmark.json"
_ALL_UP_TO = 4  # each number of ranks or hosts up to here is measured; above, powers of two and the last number


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The throughput with one number of hosts and ranks."""

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
    own_per_s: Sequence[float]  # images a second over all ranks, for each block of steps
    reference_per_s: Sequence[float]  # the same for a plain loop, whose blocks take turns with Paceline's

    @classmethod
    def from_json(cls, throughput: Mapping[str, Any]) -> ScalingPoint:
        """Return the point that a throughput.json (trainers.measuring.throughput) holds."""
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
        return statistics.median(self.own_per_s)

    @property
    def ratios(self) -> list[float]:
        """Paceline's speed divided by that of the reference loop, for each pair of blocks."""
        return [own / reference for own, reference in zip(self.own_per_s, self.reference_per_s, strict=True)]

    @property
    def flop_per_s(self) -> float:
        return self.images_per_s * self.flop_per_image

    @property
    def peak_share(self) -> float | None:
        """The share of all ranks' peak that was reached; None: no peak is known."""
        peak = self.peak_flop_per_s
        return self.flop_per_s / (peak * self.world_size) if peak else None


class Benchmark(NamedTuple):
    """The result of `doit benchmark`. ``left_out``: numbers of ranks that weren't measured, each with the reason."""

    folder: Path
    commit: str
    points: Sequence[ScalingPoint]
    left_out: Sequence[str]


def measure_scaling(
    config: RunConfig, pack: PackSource, *, settings: Mapping[str, float], root: Path, say: Say
) -> Benchmark:
    """Measure all points, and write benchmark.json. Raises UsageError: no number of ranks fits the batch."""
    clusters, left_out = clusters_to_measure(config.cluster, config.train.trainer.global_batch_size)
    folder = new_folder(config.runs_dir, "benchmark")
    request = {**config.resolved, "init": {}, "measure": settings}  # a measurement needs no initial weights
    results: list[dict[str, Any]] = []
    for number, cluster in enumerate(clusters, start=1):
        nodes, ranks = cluster.nnodes, cluster.world_size
        say(f"\n{number} of {len(clusters)}: {counted(nodes, 'host')}, {counted(ranks, 'rank')}")
        result = run(
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
    write_json(folder / BENCHMARK, content)
    return Benchmark(folder, commit, [ScalingPoint.from_json(result) for result in results], left_out)


def _commit(config: RunConfig, root: Path) -> str:
    run = {"overrides": (), "hosts": (), "data_digest": "", "unix_time": time.time()}
    origin, _ = provenance.collect(root, (), run, outputs=[config.runs_dir, config.data_dir])
    if origin.git_commit is None:
        return "unknown"
    return f"{origin.git_commit[:10]}{'-dirty' if origin.git_dirty else ''}"


# ------------------------------------------------------------------------------- clusters and tables (pure)
def clusters_to_measure(cluster: Cluster, global_batch_size: int) -> tuple[list[Cluster], list[str]]:
    """Return clusters of 1…N ranks on the first host and of 1…M hosts; and texts about the clusters that are left out,
    because their ranks can't share a batch. Raises UsageError: none is possible."""
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
    """Format the result for a terminal: a line for each number of hosts and ranks."""
    first = benchmark.points[0]
    lines = [
        f"{first.model} ({first.parameters:,} parameters) on {first.dataset}, {first.precision}, "
        f"global batch {first.global_batch_size}",
        f"{first.hardware}; torch {first.torch}, {first.backend}; commit {benchmark.commit}",
        "",
        "images/s over all ranks; the reference loop took turns with Paceline, block by block",
        f"{'hosts':>5}{'ranks':>6}{'threads':>8}{'median':>11}{'min':>11}{'max':>11}{'n':>4}{'scaling':>9}"
        f"{'reference loop':>16}  {'ratio (min – max)':<20}{'TFLOP/s':>9}{'of peak':>9}",
        *(_table_row(point, first) for point in benchmark.points),
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


def _table_row(point: ScalingPoint, first: ScalingPoint) -> str:
    own, ratios = point.own_per_s, point.ratios
    scaling, reference = point.images_per_s / first.images_per_s, statistics.median(point.reference_per_s)
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})"
    peak_share = "–" if point.peak_share is None else f"{point.peak_share:.1%}"
    return (
        f"{point.nnodes:>5}{point.world_size:>6}{point.threads:>8}{point.images_per_s:>11,.1f}{min(own):>11,.1f}"
        f"{max(own):>11,.1f}{len(own):>4}{scaling:>9.2f}{reference:>16,.1f}  {ratio:<20}"
        f"{point.flop_per_s / 1e12:>9.3f}{peak_share:>9}"
    )
