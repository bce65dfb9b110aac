"""The picture of a benchmark: ``python -m pipeline.diagnostics.benchmark.plot BENCHMARK.json PICTURE.png``."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.core.files import write_atomic
from pipeline.core.tables import counted
from pipeline.diagnostics.benchmark.figures import Row, rows

_BLUE, _RED, _GREY = "#014f86", "#e07a5f", "#bfc5cc"
_COLOURS = {
    "data": "#8ecae6",
    "forward": "#2a6f97",
    "backward": _BLUE,
    "communication": _RED,
    "optimizer": "#81b29a",
    "other": _GREY,
}


def picture(benchmark: Mapping[str, Any]) -> bytes:
    """Draw a PNG: throughput beside the reference loop and perfect scaling, and a step taken apart."""
    results, table_rows = benchmark["points"], rows(benchmark["points"])
    figure = Figure(figsize=(11.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _throughput(left, table_rows)
    _parts(right, results, table_rows)
    first = results[0]
    figure.suptitle(
        f"{first['model']} on {first['dataset']}, {first['precision']}, global batch {first['global_batch_size']}"
        f"  ·  {first['hardware']['name']}, {first['backend']}",
        fontsize=11,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _names(table_rows: Sequence[Row]) -> list[str]:
    return [f"{counted(row.nodes, 'host')}\n{counted(row.ranks, 'rank')}" for row in table_rows]


def _throughput(axes: Axes, table_rows: Sequence[Row]) -> None:
    at = range(len(table_rows))
    rates = [row.rate for row in table_rows]
    spread = [[row.rate - row.rate_min for row in table_rows], [row.rate_max - row.rate for row in table_rows]]
    axes.bar([x - 0.2 for x in at], rates, 0.4, yerr=spread, capsize=4, color=_BLUE, label="Paceline (min – max)")
    axes.bar([x + 0.2 for x in at], [row.plain for row in table_rows], 0.4, color=_GREY, label="plain PyTorch loop")
    ideal = [table_rows[0].rate * row.ranks / table_rows[0].ranks for row in table_rows]
    if len(table_rows) > 1:
        axes.plot(at, ideal, linestyle=":", color=_RED, marker=".", label="first point × ranks")
    axes.set_xticks(list(at), _names(table_rows))
    axes.set_ylabel("images/s, all ranks")
    axes.set_title(f"throughput, median of n = {table_rows[0].n}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 1.25 * max([*ideal, *(row.rate_max for row in table_rows), *(row.plain for row in table_rows)]))
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _parts(axes: Axes, results: Sequence[Mapping[str, Any]], table_rows: Sequence[Row]) -> None:
    base = [0.0] * len(results)
    for name, colour in _COLOURS.items():
        values = [result["parts_s"][name] * 1e3 for result in results]
        axes.bar(range(len(results)), values, 0.5, bottom=base, color=colour, label=name)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_xticks(range(len(table_rows)), _names(table_rows))
    axes.set_ylabel("ms a step")
    axes.set_title("one step taken apart", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    write_atomic(target, picture(json.loads(source.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
