"""`doit allreduce`: trainers.measuring.allreduce on the cluster, its options checked here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster
from pipeline.diagnostics import node_module
from trainers.contract import run_folder

MODULE = "trainers.measuring.allreduce"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def settings(options: Mapping[str, str]) -> dict[str, int]:
    """``min_bytes``, ``max_bytes`` and ``iterations`` as they were typed. Raises UsageError."""
    parsed = {name: _size(name, options[name]) for name in ("min_bytes", "max_bytes") if name in options}
    parsed |= node_module.whole_numbers(options, "iterations")
    if parsed.get("min_bytes", 8) < 4 or parsed.get("max_bytes", 1 << 30) < parsed.get("min_bytes", 8):
        shown = ", ".join(f"{name}={options[name]}" for name in options)
        raise UsageError(f"{shown}: the smallest message has at least 4 bytes, and none is larger than max_bytes")
    return parsed


def measure(
    cluster: Cluster, *, backend: str, options: Mapping[str, str], runs_dir: Path, root: Path, say: node_module.Say
) -> tuple[Path, dict[str, Any]]:
    """Run it; the folder of the results and what rank 0 wrote.

    Raises:
        UsageError: an option that makes no sense, or one rank alone.
        HostError, TrainingError, Killed: as a launch does.
    """
    given = settings(options)
    if cluster.world_size < 2:
        raise UsageError(
            "an all-reduce needs at least 2 ranks; this cluster has 1", hint="cluster.nproc_per_node=2, or more hosts"
        )
    folder = node_module.new_folder(runs_dir, "allreduce")
    diagnosis = node_module.Diagnosis(
        module=MODULE, config={"strategy": {"backend": backend}, "allreduce": given}, result=run_folder.ALLREDUCE
    )
    return folder, node_module.run(diagnosis, cluster=cluster, folder=folder, root=root, pack=None, say=say)


def summary(result: Mapping[str, Any]) -> str:
    """The bandwidth of the largest message, and the slowest pair of nodes where there are several. Pure."""
    last = result["rows"][-1]
    text = f"bus bandwidth {_rate(last)} at {last['size_bytes']:,} bytes, {result['world_size']} ranks, every sum right"
    if result["pairs"]:
        slowest = min(result["pairs"], key=lambda pair: float(pair["bus_bytes_per_s"]))
        text += f"; slowest pair {' – '.join(slowest['hosts'])}: {_rate(slowest)}"
    return text


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['bus_bytes_per_s'] / 1e9:.3f} GB/s"


def _size(name: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper(), re.ASCII)
    if match is None:
        raise UsageError(f"{name}={text} is no size; write 8, 64K, 16M or 1G")
    return int(match.group(1)) * _UNITS[match.group(2)]
