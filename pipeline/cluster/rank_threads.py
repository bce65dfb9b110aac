"""How many threads each rank computes with: not in the key, but in the weights, so a run keeps to one number a node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.core.specs import LaunchPlan, NodeFacts
from pipeline.core.tables import counted
from pipeline.runs.checkpoints import DAMAGE, read_side

VARIABLE = "OMP_NUM_THREADS"


def of_shards(shards: int, nnodes: int) -> tuple[int, ...]:
    """One thread a rank on every node where trainer.shards promises the same weights on any; else empty.

    A host's cores must not decide there, nor how many ranks share them. ``cluster.env`` sets another number, which is
    a part of the key.
    """
    return (1,) * nnodes if shards else ()


def of_checkpoints(run_dir: Path) -> tuple[int, ...]:
    """Threads of each rank, node by node, in the attempts that the checkpoints in ``run_dir`` come from.

    Empty where there is no checkpoint to go on from, or neither what stands beside it nor the plan tells.
    """
    found = sorted((run_dir / "checkpoints").glob("step-*.pt"), reverse=True)
    for path in found:
        with suppress(*DAMAGE):
            return tuple(max(1, int(node["threads_per_rank"])) for node in read_side(path)["nodes"])
    if not found:
        return ()
    try:
        plan: Any = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
        return tuple(max(1, int(node["env"][VARIABLE])) for node in plan["nodes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def shortages(plan: LaunchPlan, facts: Sequence[NodeFacts]) -> list[str]:
    """A line for each host that has fewer cores than its ranks' threads, which an earlier attempt or run decided."""
    said = []
    for node, fact in zip(plan.nodes, facts, strict=True):
        threads = node.env.get(VARIABLE, "")
        if threads.isdecimal() and int(threads) > 1 and int(threads) * node.nproc_per_node > fact.cpus:
            said.append(
                f"{node.host}: {counted(node.nproc_per_node, 'rank')} of {threads} threads, as before, on "
                f"{counted(fact.cpus, 'core')}: "
                "equal weights, but slower than the number of threads that suits this host"
            )
    return said
