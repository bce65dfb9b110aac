"""`doit benchmark against=…`: the same network, images and batch in other people's loops, on this computer's CPU.

benchmarks/training.py does the work: what it compares with is no part of the project (Lightning and Accelerate go into
an environment of their own).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import system_temporary_prefix
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.processes.process import run as run_process
from pipeline.core.tables import counted
from pipeline.diagnostics import node_module

SCRIPT = "benchmarks/training.py"
LOOPS = ("tuned", "guide", "lightning", "accelerate")  # guide: the loop that tutorials of PyTorch show
_PAIRS = 5
_LIMIT_S = 3600.0
_TITLES = {"tuned": "hand-tuned", "guide": "tutorial loop", "lightning": "Lightning", "accelerate": "Accelerate"}


def requested_loops(options: Mapping[str, str], config: RunConfig, root: Path) -> tuple[str, ...]:
    """Return the loops that ``against`` names.

    Raises:
        UsageError: an unknown one, or a training that they can't do as it is configured.
    """
    if "against" not in options:
        return ()
    names = tuple(options["against"].split(","))
    for name in names:
        if name not in LOOPS:
            raise UsageError(f"against={name} is unknown; known are {', '.join(LOOPS)} (commas between several)")
    if not launchers.capabilities(config.cluster).is_this_computer:
        raise UsageError(
            f"against= compares on this computer, not on the hosts of launcher {config.cluster.launcher}",
            hint="cluster=local",
        )
    model = config.train.model
    if model != type(model)(name=model.name):
        raise UsageError(
            f"against= compares model={model.name} as it is by default, and this one is changed",
            hint="the same without overrides of model.*",
        )
    if not (root / SCRIPT).is_file():
        raise UsageError(f"against= needs {SCRIPT}, which is not in {root}", hint="a clone of the whole repository")
    return names


def compare(
    names: Sequence[str], config: RunConfig, pack: PackSource, *, pairs: int | None, root: Path, say: node_module.Say
) -> list[dict[str, Any]]:
    """Measure each loop in turns with Paceline's; return an entry of benchmark.json for each.

    Raises:
        PacelineError: a launch fails; its output is in the message.
    """
    trainer, ranks, comparisons = config.train.trainer, config.cluster.hosts[0].nproc_per_node, []
    for name in names:
        say(
            f"\nagainst {_TITLES[name]}: {pairs or _PAIRS} launches of each, in turns; "
            f"{counted(ranks, 'rank')} on the CPU"
        )
        with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("benchmark")) as temporary:
            result = Path(temporary) / "figures.json"
            words = [config.train.model.name, str(pairs or _PAIRS), name]
            words += [] if trainer.precision == "auto" else [trainer.precision]
            words += ["--batch", str(trainer.global_batch_size), "--ranks", str(ranks)]
            words += ["--pack", str(pack.path), "--json", str(result)]
            with waiting(say, f"measuring Paceline and {_TITLES[name]} in turns"):
                done = run_process([sys.executable, str(root / SCRIPT), *words], timeout_s=_LIMIT_S)
            if done.code != 0:
                raise PacelineError(f"{SCRIPT} {' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
            figures = json.loads(result.read_text(encoding="utf-8"))
        comparisons.append({"loop": name, "world_size": ranks, "pack_digest": pack.digest, **figures})
    return comparisons


def table(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a terminal's table; empty without a comparison."""
    if not comparisons:
        return []
    lines = [
        "against other loops on this computer's CPU, launch by launch in turns",
        f"{'against':<14}{'ranks':>6}{'precision':>11}{'images/s':>11}{'theirs':>11}{'n':>4}  "
        f"{'speed, ours ÷ theirs':<23}{'CPU time, theirs ÷ ours':<23}",
    ]
    for item in comparisons:
        name, rates, cpu = item["loop"], item["images_per_s"], item["cpu_s_a_step"]
        ratios = [ours / theirs for ours, theirs in zip(rates["paceline"], rates[name], strict=True)]
        loads = [theirs / ours for ours, theirs in zip(cpu["paceline"], cpu[name], strict=True)]
        lines.append(
            f"{_TITLES[name]:<14}{item['world_size']:>6}{item['precision']:>11}"
            f"{statistics.median(rates['paceline']):>11,.1f}{statistics.median(rates[name]):>11,.1f}{len(ratios):>4}  "
            f"{_spread(ratios):<23}{_spread(loads):<23}"
        )
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} – {max(values):.3f})"
