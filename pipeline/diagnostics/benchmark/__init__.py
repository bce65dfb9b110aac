"""`doit benchmark`: the configured training on one rank, more ranks, more hosts, against a plain PyTorch loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_json
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.diagnostics import node_module
from pipeline.diagnostics.benchmark import against
from pipeline.diagnostics.benchmark.figures import points, table
from pipeline.runs import provenance
from trainers.contract import run_folder

MODULE = "trainers.measuring.measure"
RESULT = "benchmark.json"
PICTURE = "benchmark.png"
_PLOT_LIMIT_S = 120.0


def settings(options: Mapping[str, str]) -> dict[str, Any]:
    """``pairs`` and ``block_s`` as they were typed. Raises UsageError."""
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
    """All points of the scaling table, one after the other; the folder of the results and benchmark.json.

    Raises:
        UsageError: an option that makes no sense, or no number of ranks that can share the global batch.
        PacelineError: another loop fails.
        HostError, TrainingError, Killed: as a launch does; the points measured before stay in their folders.
    """
    given, loops = settings(options), against.requested_loops(options, config, root)
    clusters, left_out = points(config.cluster, config.train.trainer.global_batch_size)
    folder = node_module.new_folder(config.runs_dir, "benchmark")
    settings_of_run = {**config.resolved, "init": {}, "measure": given}  # what only measures needs no weights
    diagnosis = node_module.Diagnosis(
        module=MODULE, config=settings_of_run, result=run_folder.THROUGHPUT, chosen=config.chosen
    )

    def point(number: int, cluster: Cluster) -> dict[str, Any]:
        nodes, ranks = cluster.nnodes, cluster.world_size
        say(f"\n{number} of {len(clusters)}: {counted(nodes, 'host')}, {counted(ranks, 'rank')}")
        part = folder / f"{folder.name}-{nodes}x{ranks}"
        result = node_module.run(diagnosis, cluster=cluster, folder=part, root=root, pack=pack, say=say)
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
        "against": against.compare(loops, config, pack, pairs=given.get("pairs"), root=root, say=say),
    }
    write_json(folder / RESULT, whole)
    with waiting(say, "drawing the picture"):
        _draw(folder)
    return folder, whole


def _commit(config: RunConfig, root: Path) -> str:
    """The commit that was measured, for the evidence."""
    run = {"overrides": (), "hosts": (), "data_digest": "", "unix_time": time.time()}
    origin, _ = provenance.collect(root, (), run, outputs=[config.runs_dir, config.data_dir])
    if origin.git_commit is None:
        return "unknown"
    return f"{origin.git_commit[:10]}{'-dirty' if origin.git_dirty else ''}"


def _draw(folder: Path) -> None:
    """In a process of its own: matplotlib is large."""
    argv = [sys.executable, "-m", "pipeline.diagnostics.benchmark.plot", str(folder / RESULT), str(folder / PICTURE)]
    done = process.run(argv, env=process.of_this_clone(), timeout_s=_PLOT_LIMIT_S)
    if done.code != 0:
        raise PacelineError(f"the picture of {folder / RESULT} failed: {done.stderr.strip()}")


__all__ = ["PICTURE", "RESULT", "measure", "settings", "table"]
