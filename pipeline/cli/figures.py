"""What a finished run came to, in a line, and whether that was computed otherwise than it would be here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipeline.core.printable import printable
from pipeline.core.tables import counted
from pipeline.runs.result import Result, first_metrics, nonfinite_note


def figures(result: Result) -> str:
    """``test/accuracy 0.9917, 1 node, 2 ranks, 2,459 images/s``; of a script its own metrics."""
    if result.fields.get("program"):
        return _of_script(result)
    accuracy = result.metrics.get("test/accuracy")
    shown = "no test accuracy" if accuracy is None else f"test/accuracy {accuracy:.4f}"
    warning = " (SYNTHETIC DATA: means nothing)" if result.synthetic else ""
    ranks = [counted(result.fields.get(name, 0), noun) for name, noun in (("nnodes", "node"), ("world_size", "rank"))]
    return f"{shown}{warning}, {', '.join(ranks)}, {result.images_per_s or 0:,.0f} images/s"


def _of_script(result: Result) -> str:
    """The last value of its first metrics, and whether another run has ever come out the same."""
    told = first_metrics(result.metrics, 4) or ["no metric was logged"]
    told += [nonfinite_note(result.fields), counted(sum(result.nproc_per_node), "rank")]
    if not result.fields.get("proven"):
        told.append("unproven (doit reproduce repeats it and compares)")
    return ", ".join(filter(None, told))


def other_arithmetic(result: Mapping[str, Any]) -> str | None:
    """Where a finished run was computed by a processor or GPU that this computer lacks: which, for a person.

    Args:
        result: what result.json holds.
    """
    from pipeline.runs import arithmetic

    found = arithmetic.other_than_here(result, here()) if result.get("hardware") else None
    return None if found is None else printable(found)


@cache
def here() -> dict[str, object]:
    """The hardware of this computer."""
    from pipeline.cluster.agent.processors import hardware

    return hardware()
