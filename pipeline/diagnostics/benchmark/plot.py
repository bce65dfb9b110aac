"""The picture of a benchmark: ``python -m pipeline.diagnostics.benchmark.plot BENCHMARK.json PICTURE.png``."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files import write_atomic
from pipeline.diagnostics.benchmark.figures import Row, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "data": "#8ecae6",
    "forward": "#2a6f97",
    "backward": "#014f86",
    "communication": "#e07a5f",
    "optimizer": "#81b29a",
    "other": "#bfc5cc",
}


def picture(whole: Mapping[str, Any]) -> bytes:
    """A PNG: throughput beside the plain loop and perfect scaling, and a step taken apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results, found = whole["points"], rows(whole["points"])
    figure = Figure(figsize=(11.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _throughput(left, found)
    _parts(right, results, found)
    first = results[0]
    figure.suptitle(
        f"{first['model']} on {first['dataset']}, {first['precision']}, global batch {first['global_batch_size']}"
        f"  ·  {first['hardware']['name']}, {first['backend']}",
        fontsize=11,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _names(found: Sequence[Row]) -> list[str]:
    return [
        f"{row.nodes} host{'s' if row.nodes > 1 else ''}\n{row.ranks} rank{'s' if row.ranks > 1 else ''}"
        for row in found
    ]


def _throughput(axes: Axes, found: Sequence[Row]) -> None:
    at = range(len(found))
    rates = [row.rate for row in found]
    spread = [[row.rate - row.rate_min for row in found], [row.rate_max - row.rate for row in found]]
    axes.bar([x - 0.2 for x in at], rates, 0.4, yerr=spread, capsize=4, color="#014f86", label="Paceline (min – max)")
    axes.bar([x + 0.2 for x in at], [row.plain for row in found], 0.4, color="#bfc5cc", label="plain PyTorch loop")
    ideal = [found[0].rate * row.ranks / found[0].ranks for row in found]
    if len(found) > 1:
        axes.plot(at, ideal, linestyle=":", color="#e07a5f", marker=".", label="first point × ranks")
    axes.set_xticks(list(at), _names(found))
    axes.set_ylabel("images/s, all ranks")
    axes.set_title(f"throughput, median of n = {found[0].n}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 1.25 * max([*ideal, *(row.rate_max for row in found), *(row.plain for row in found)]))
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _parts(axes: Axes, results: Sequence[Mapping[str, Any]], found: Sequence[Row]) -> None:
    base = [0.0] * len(results)
    for name, colour in _COLOURS.items():
        values = [result["parts_s"][name] * 1e3 for result in results]
        axes.bar(range(len(results)), values, 0.5, bottom=base, color=colour, label=name)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_xticks(range(len(found)), _names(found))
    axes.set_ylabel("ms a step")
    axes.set_title("one step taken apart", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    write_atomic(target, picture(json.loads(source.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
