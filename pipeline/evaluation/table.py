"""Format an evaluation report as a terminal table. Separate from the report's code, which counts in its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.printable import printable
from pipeline.core.tables import aligned, columns, padded

MOST_CONFUSED = 5
"""Pairs of classes that are named."""
_AVERAGES = ("macro avg", "weighted avg")


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """``count`` of the ``of`` images of class ``true`` were taken for ``predicted``."""

    true: str
    predicted: str
    count: int
    of: int

    @property
    def text(self) -> str:
        return f"{printable(self.true)} taken for {printable(self.predicted)}"


def most_confused(report: Mapping[str, Any]) -> list[Confusion]:
    """Return the pairs of classes that were confused most often."""
    names, matrix = [*report["per_class"]], report["confusion_matrix"]
    pairs = [
        Confusion(true=names[true], predicted=names[at], count=count, of=sum(row))
        for true, row in enumerate(matrix)
        for at, count in enumerate(row)
        if at != true and count
    ]
    return sorted(pairs, key=lambda pair: -pair.count)[:MOST_CONFUSED]


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as a compact table, with the pairs of classes that were confused most often."""
    rows = [*report["per_class"].items(), *((name, report[name]) for name in _AVERAGES)]
    width = max(columns(printable(name)) for name, _ in rows)
    lines = [
        f"{report['split']} accuracy {report['accuracy']:.4f} on {report['n']:,} images",
        f"{'':{width}}  precision  recall      f1  support",
    ]
    if report["synthetic"]:
        lines.insert(0, "SYNTHETIC DATA: this accuracy means nothing")
    for name, row in rows:
        figures = f"{row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1-score']:6.4f}  {row['support']:7,.0f}"
        lines.append(f"{padded(printable(name), width)}  {figures}")
    if confused := most_confused(report):
        said = [(f"  {pair.text}", f"{pair.count:,} of {pair.of:,}") for pair in confused]
        lines += ["most confused", *aligned(said).splitlines()]
    return "\n".join(lines)
