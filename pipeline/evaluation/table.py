"""Format an evaluation report as a terminal table. Separate from the report's code, which counts in its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core.printable import printable
from pipeline.core.tables import columns, padded

_AVERAGES = ("macro avg", "weighted avg")


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as a compact table."""
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
    return "\n".join(lines)
