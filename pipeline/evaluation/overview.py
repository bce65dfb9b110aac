"""One picture of a run: learning curves, F1 per class, and misclassified images.

It is an addition to the report: parts that can't be drawn (encoded images, metrics.jsonl missing) are left out.
"""

from __future__ import annotations

import io
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.ft2font import FT2Font
from PIL import Image

from pipeline.core import documents
from pipeline.runs import metrics_file
from trainers.contract import run_folder

FILE = "evaluation/overview.png"
_CURVES = ("train/loss", "val/loss", "val/accuracy")
_MAX_BARS = 30
_COLUMNS, _ROWS = 8, 2
_MAX_LABEL = 16  # characters of a class name below an image


@dataclass(frozen=True)
class Mistake:
    """A misclassified image by its index in the split, with its true and predicted class."""

    place: int
    true: int
    predicted: int


def worst(targets: Sequence[int], predictions: Sequence[int], limit: int) -> list[Mistake]:
    """Return mistakes of the most frequent confusions in turn, so that no pair of classes fills the picture."""
    pairs: dict[tuple[int, int], list[Mistake]] = {}
    for place, (true, predicted) in enumerate(zip(targets, predictions, strict=True)):
        if true != predicted:
            pairs.setdefault((true, predicted), []).append(Mistake(place, true, predicted))
    often = sorted(pairs, key=lambda pair: (-len(pairs[pair]), pair))
    turns = ((turn, at) for turn in range(limit) for at in often if turn < len(pairs[at]))
    return [pairs[at][turn] for (turn, at), _ in zip(turns, range(limit), strict=False)]


def curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of the finite points of each curve in metrics.jsonl."""
    points_by_name: dict[str, list[tuple[int, float]]] = {}
    for row in metrics_file.rows(path):
        for name in _CURVES:
            value = row.metrics.get(name)
            if value is not None and math.isfinite(value):
                points_by_name.setdefault(name, []).append((row.step, value))
    return points_by_name


def images(data: Path, split: str, mistakes: Sequence[Mistake]) -> list[Image.Image]:
    """Return the images of the mistakes in order; empty if the pack has no plain pixels of one or three channels."""
    manifest = documents.read_or_empty(data / "manifest.json")
    names = ("count", "channels", "height", "width")
    sizes = [manifest.get(name) for name in names]
    if not all(isinstance(size, int) for size in sizes) or sizes[1] not in (1, 3) or split not in manifest["splits"]:
        return []
    count, channels, height, width = (int(size or 0) for size in sizes)
    pixels, path = height * width, data / "images.bin"
    if not path.is_file() or path.stat().st_size != count * channels * pixels:
        return []
    pictures = []
    with path.open("rb") as file:
        for mistake in mistakes:
            file.seek((manifest["splits"][split][0] + mistake.place) * channels * pixels)
            planes = [Image.frombytes("L", (width, height), file.read(pixels)) for _ in range(channels)]
            pictures.append(planes[0] if channels == 1 else Image.merge("RGB", planes))
    return pictures


def picture(report: Mapping[str, Any], run_dir: Path, targets: Sequence[int], predictions: Sequence[int]) -> bytes:
    """Return a PNG; equal runs give equal bytes. Raises OSError: a file of the run can't be read."""
    mistakes = worst(targets, predictions, _COLUMNS * _ROWS)
    shown = images(run_dir / "data", str(report["split"]), mistakes)
    families, names = drawable(report["classes"])
    with mpl.rc_context({"font.family": families}):
        figure = Figure(figsize=(11, 7.5 if shown else 4), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        ratios = [3, *([1.2] * _ROWS if shown else [])]
        grid = figure.add_gridspec(len(ratios), _COLUMNS, height_ratios=ratios)
        _draw_curves(figure.add_subplot(grid[0, : _COLUMNS // 2]), curves(run_dir / run_folder.METRICS))
        _draw_bars(figure.add_subplot(grid[0, _COLUMNS // 2 :]), report, names)
        for number, (mistake, image) in enumerate(zip(mistakes, shown, strict=False)):
            axes = figure.add_subplot(grid[1 + number // _COLUMNS, number % _COLUMNS])
            _draw_mistake(axes, mistake, image, names)
        title = f"{report['split']} accuracy {report['accuracy']:.2%}  ·  n = {report['n']:,}"
        figure.suptitle(f"SYNTHETIC DATA, means nothing: {title}" if report["synthetic"] else title, parse_math=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_curves(axes: Axes, points_by_name: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    right = axes.twinx() if "val/accuracy" in points_by_name else axes
    for number, (name, points) in enumerate(points_by_name.items()):
        where = right if name == "val/accuracy" else axes
        at, values = [step for step, _ in points], [value for _, value in points]
        where.plot(at, values, label=name, color=f"C{number}", marker="o" if len(points) == 1 else "")
    if right is not axes:
        right.set_ylabel("val/accuracy")
        right.set_ylim(0.0, 1.0)
    if points_by_name:
        axes.figure.legend(loc="outside lower left", ncols=3, fontsize=8, frameon=False)


def _draw_bars(axes: Axes, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """Draw F1 per class; if there are too many classes, only the worst. ``names`` are the class names in order."""
    scores = [(name, row["f1-score"]) for name, row in zip(names, report["per_class"].values(), strict=True)]
    if len(scores) > _MAX_BARS:
        scores = sorted(scores, key=lambda item: item[1])[:_MAX_BARS]
    places = list(range(len(scores)))
    axes.bar(places, [score for _, score in scores], color="#3b76af")
    axes.set_xticks(places, [_short(name) for name, _ in scores], rotation=40, ha="right", fontsize=8, parse_math=False)
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("F1" if len(scores) == len(report["per_class"]) else f"F1 of the {_MAX_BARS} worst classes")


def _draw_mistake(axes: Axes, mistake: Mistake, image: Image.Image, classes: Sequence[str]) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=255)
    axes.set_xticks([])
    axes.set_yticks([])
    title = f"{_short(classes[mistake.true])}\nas {_short(classes[mistake.predicted])}"
    axes.set_title(title, fontsize=8, parse_math=False)


def _short(name: str) -> str:
    return name if len(name) <= _MAX_LABEL else name[: _MAX_LABEL - 1] + "…"


# ---------------------------------------------------------------------------------------------- fonts
_FIRST = "DejaVu Sans"  # matplotlib's own, without Chinese, Japanese and Korean characters
_PLACEHOLDERS = "Last Resort"  # draws a box for each character


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return font families in order of preference, and the names in drawable form.

    A name that no family can draw becomes ``#`` and its number.
    """
    if all(name.isascii() for name in names):
        return [_FIRST], [*names]
    families = {_FIRST: characters(_FIRST)}
    missing = {char for name in names for char in name if ord(char) not in families[_FIRST]}
    if missing and (more := _covering(frozenset(missing))) is not None:
        families[more] = characters(more)
        missing = {char for char in missing if ord(char) not in families[more]}
    return [*families], [f"#{at}" if missing.intersection(name) else name for at, name in enumerate(names)]


@cache
def _covering(wanted: frozenset[str]) -> str | None:
    """Return the installed family with most of these characters; None if none has any."""
    counts = {name: sum(ord(char) in characters(name) for char in wanted) for name in sorted(installed() - {_FIRST})}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] else None


def installed() -> set[str]:
    """Return the families with a face of regular weight."""
    usual = {font.name for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")}
    return {name for name in usual if not name.startswith(_PLACEHOLDERS)}


def characters(family: str) -> Container[int]:
    """Return the code points that the family has."""
    return FT2Font(fontManager.findfont(FontProperties(family=[family]))).get_charmap()
