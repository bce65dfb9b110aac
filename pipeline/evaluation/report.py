"""The evaluation report of a finished run, from predictions.json: accuracy, figures per class and confusion matrix as
report.json, the matrix and an overview (curves, F1 per class, misclassified images) as pictures."""

from __future__ import annotations

import io
import itertools
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
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic, write_json
from pipeline.runs import metrics_file
from trainers.contract import run_folder

Report = dict[str, Any]
"""The content of evaluation/report.json.

``accuracy`` (0..1), ``n`` (images), ``split``, ``classes`` (names), ``synthetic``, ``per_class`` (name → precision,
recall, f1-score, support), ``macro avg`` and ``weighted avg`` (the same four), ``confusion_matrix`` (counts; rows =
true class, columns = predicted), ``weights_sha256``, ``dataset_digest``, ``made_of`` (``stored_report.made_of``).
"""

_AVERAGES = ("macro avg", "weighted avg")
_MAX_NUMBERED_CLASSES = 25  # with more classes, the cells are too small for numbers
_MAX_LABEL = 28  # characters of a class name on an axis


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a report is made from: true and predicted class of each image of a split, as numbers into ``classes``."""

    split: str
    targets: list[int]
    predictions: list[int]
    classes: list[str]
    synthetic: bool
    summary: Mapping[str, Any]


def evaluate(run_dir: Path, made_of: Mapping[str, Any]) -> Report:
    """Make evaluation/report.json, confusion_matrix.png and overview.png from predictions.json. Raises PacelineError:
    predictions.json or the data's manifest is missing or invalid; OSError: a file can't be written."""
    outcome = _read(run_dir)
    report = {**_report(outcome), "made_of": made_of}
    write_atomic(run_dir / run_folder.CONFUSION_MATRIX, _picture(report))
    write_atomic(run_dir / OVERVIEW, overview(report, run_dir, outcome.targets, outcome.predictions))
    # written last: where it exists, the pictures do
    write_json(run_dir / run_folder.REPORT, report)
    return report


# --------------------------------------------------------------------------------------- reading
def _read(run_dir: Path) -> _Outcome:
    again = f"doit train, then doit evaluate {run_dir.name}"
    predictions = _object(run_dir / run_folder.PREDICTIONS, again)
    manifest = _object(run_dir / "data" / "manifest.json", "doit train with the words of the run, which links its data")
    summary_path = run_dir / run_folder.SUMMARY
    summary = _object(summary_path, again) if summary_path.exists() else {}
    targets, predicted = predictions.get("targets"), predictions.get("predictions")
    where = run_dir / run_folder.PREDICTIONS
    if not isinstance(targets, list) or not isinstance(predicted, list) or len(targets) != len(predicted):
        sizes = " and ".join("no list" if not isinstance(x, list) else str(len(x)) for x in (targets, predicted))
        raise PacelineError(f"{where}: targets and predictions must be lists of one length, not {sizes}", hint=again)
    if not targets:
        raise PacelineError(f"{where} holds no predictions: the test split is empty", hint="dataset.holdout=5000")
    classes = [str(name) for name in manifest.get("classes") or []]
    for number in [*targets, *predicted]:
        if type(number) is not int or not 0 <= number < len(classes):
            what = f"{where}: {number!r} is no class; the data has 0..{len(classes) - 1}"
            raise PacelineError(what, hint=again)
    return _Outcome(
        split=str(predictions.get("split", "test")),
        targets=targets,
        predictions=predicted,
        classes=classes,
        synthetic=bool(manifest.get("synthetic") or summary.get("synthetic")),
        summary=summary,
    )


def _object(path: Path, hint: str) -> dict[str, Any]:
    try:
        return documents.read(path)
    except FileNotFoundError:
        raise PacelineError(f"{path} is missing: there is nothing to evaluate yet", hint=hint) from None
    except documents.DamagedError as error:
        raise PacelineError(f"{path} {error}", hint=hint) from error


# --------------------------------------------------------------------------------------- figures
def _report(outcome: _Outcome) -> Report:
    from sklearn.metrics import classification_report, confusion_matrix  # late: a page of comparisons does without

    numbers = list(range(len(outcome.classes)))
    table = classification_report(
        outcome.targets, outcome.predictions, labels=numbers, output_dict=True, zero_division=0.0
    )
    right = sum(map(int.__eq__, outcome.targets, outcome.predictions))
    classes = outcome.classes
    # classes with equal names are told apart by their numbers
    names = [name if classes.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(classes)]
    return {
        "split": outcome.split,
        "accuracy": right / len(outcome.targets),
        "n": len(outcome.targets),
        "synthetic": outcome.synthetic,
        "classes": outcome.classes,
        "per_class": {name: table[str(number)] for number, name in enumerate(names)},
        **{name: table[name] for name in _AVERAGES},
        "confusion_matrix": confusion_matrix(outcome.targets, outcome.predictions, labels=numbers).tolist(),
        "weights_sha256": outcome.summary.get("weights_sha256"),
        "dataset_digest": outcome.summary.get("dataset_digest"),
    }


# --------------------------------------------------------------------------------------- picture
def _picture(report: Report) -> bytes:
    """Return the confusion matrix as PNG: shades are shares of the true class. Equal reports give equal bytes."""
    families, names = drawable(report["classes"])
    side = min(max(2.6 + 0.52 * len(names), 4.6), 16.0)  # inches
    with mpl.rc_context({"font.family": families}):
        figure = Figure(figsize=(side + 0.9, side), dpi=150)
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), {**report, "classes": names})
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.2, metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Axes, report: Report) -> None:
    matrix = report["confusion_matrix"]
    shares = [[cell / max(sum(row), 1) for cell in row] for row in matrix]
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    bar = axes.figure.colorbar(
        image, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)), format=lambda share, _: f"{share:.0%}"
    )
    bar.set_label("share of the true class")
    bar.outline.set_visible(False)
    _label_axes(axes, report["classes"])
    cells = [(x, y, cell) for y, row in enumerate(matrix) for x, cell in enumerate(row)]
    for x, y, cell in cells if len(matrix) <= _MAX_NUMBERED_CLASSES else ():
        # readable on the shade of the cell; zeros are pale
        colour = "white" if shares[y][x] > 0.55 else "#1b2a3a" if cell else "#b8c4d0"
        axes.text(x, y, f"{cell}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_title(_title(report), fontsize=12, pad=10)
    if report["synthetic"]:
        axes.annotate(
            "SYNTHETIC DATA – this accuracy means nothing", (0.5, 1.0), xycoords="axes fraction", xytext=(0, 34),
            textcoords="offset points", ha="center", color="#b00020", fontsize=12, weight="bold",
        )  # fmt: skip


def _title(report: Mapping[str, Any]) -> str:
    return f"{report['split']} accuracy {report['accuracy']:.2%}  ·  n = {report['n']:,}"


def _label_axes(axes: Axes, classes: Sequence[str]) -> None:
    every = -(-len(classes) // 50)  # at most 50 names fit along an axis
    shown = range(0, len(classes), every)
    names = [_short(classes[number], _MAX_LABEL) for number in shown]
    slanted = max(map(len, names)) > 3
    axes.set_xticks(shown, names, rotation=40 if slanted else 0, ha="right" if slanted else "center", parse_math=False)
    axes.set_yticks(shown, names, parse_math=False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.spines[:].set_visible(False)
    edges = [number - 0.5 for number in range(1, len(classes))]  # between the cells
    if len(classes) <= _MAX_NUMBERED_CLASSES:
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)


# -------------------------------------------------------------------------------------------- overview
OVERVIEW = "evaluation/overview.png"
_CURVES = ("train/loss", "val/loss", "val/accuracy")
_MAX_BARS = 30
_COLUMNS, _ROWS = 8, 2
_MAX_CAPTION = 16  # characters of a class name below an image


@dataclass(frozen=True)
class Mistake:
    """A misclassified image, with its true and predicted class."""

    index: int  # in the split
    true: int
    predicted: int


def worst_mistakes(targets: Sequence[int], predictions: Sequence[int], limit: int) -> list[Mistake]:
    """Return up to ``limit`` mistakes: one of each pair of classes in turn, so that no pair fills the picture. Pairs
    that are confused most often come first."""
    by_pair: dict[tuple[int, int], list[Mistake]] = {}
    for index, (true, predicted) in enumerate(zip(targets, predictions, strict=True)):
        if true != predicted:
            by_pair.setdefault((true, predicted), []).append(Mistake(index, true, predicted))
    most_first = sorted(by_pair, key=lambda pair: (-len(by_pair[pair]), pair))
    turns = itertools.zip_longest(*(by_pair[pair] for pair in most_first))
    return [mistake for turn in turns for mistake in turn if mistake is not None][:limit]


def curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return metric → (step, value) of the finite points in metrics.jsonl, for the drawn metrics."""
    points_by_name: dict[str, list[tuple[int, float]]] = {}
    for row in metrics_file.rows(path):
        for name in _CURVES:
            value = row.metrics.get(name)
            if value is not None and math.isfinite(value):
                points_by_name.setdefault(name, []).append((row.step, value))
    return points_by_name


def images(data: Path, split: str, mistakes: Sequence[Mistake]) -> list[Image.Image]:
    """Return the mistakes' images from the data pack; none if it has no plain pixels of one or three channels."""
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
            file.seek((manifest["splits"][split][0] + mistake.index) * channels * pixels)
            planes = [Image.frombytes("L", (width, height), file.read(pixels)) for _ in range(channels)]
            pictures.append(planes[0] if channels == 1 else Image.merge("RGB", planes))
    return pictures


def overview(report: Mapping[str, Any], run_dir: Path, targets: Sequence[int], predictions: Sequence[int]) -> bytes:
    """Return the overview as PNG; equal runs give equal bytes. Raises OSError: a file of the run can't be read."""
    mistakes = worst_mistakes(targets, predictions, _COLUMNS * _ROWS)
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
            axes.imshow(image, cmap="gray", vmin=0, vmax=255)
            axes.set_xticks([])
            axes.set_yticks([])
            caption = f"{_short(names[mistake.true])}\nas {_short(names[mistake.predicted])}"
            axes.set_title(caption, fontsize=8, parse_math=False)
        warning = "SYNTHETIC DATA, means nothing: " if report["synthetic"] else ""
        figure.suptitle(f"{warning}{_title(report)}", parse_math=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_curves(axes: Axes, points_by_name: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    right = axes.twinx() if "val/accuracy" in points_by_name else axes
    for number, (name, points) in enumerate(points_by_name.items()):
        chosen = right if name == "val/accuracy" else axes
        steps, values = [step for step, _ in points], [value for _, value in points]
        chosen.plot(steps, values, label=name, color=f"C{number}", marker="o" if len(points) == 1 else "")
    if right is not axes:
        right.set_ylabel("val/accuracy")
        right.set_ylim(0.0, 1.0)
    if points_by_name:
        axes.figure.legend(loc="outside lower left", ncols=3, fontsize=8, frameon=False)


def _draw_bars(axes: Axes, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """Draw F1 per class; of too many classes, only the worst. ``names``: the class names in order, as drawn."""
    scores = [(name, row["f1-score"]) for name, row in zip(names, report["per_class"].values(), strict=True)]
    if len(scores) > _MAX_BARS:
        scores = sorted(scores, key=lambda item: item[1])[:_MAX_BARS]
    bars, labels = list(range(len(scores))), [_short(name) for name, _ in scores]
    axes.bar(bars, [score for _, score in scores], color="#3b76af")
    axes.set_xticks(bars, labels, rotation=40, ha="right", fontsize=8, parse_math=False)
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("F1" if len(scores) == len(report["per_class"]) else f"F1 of the {_MAX_BARS} worst classes")


def _short(name: str, most: int = _MAX_CAPTION) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


# ---------------------------------------------------------------------------------------------- fonts
_DEFAULT_FONT = "DejaVu Sans"  # matplotlib's own, without Chinese, Japanese and Korean characters
_PLACEHOLDERS = "Last Resort"  # draws a box for each character


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the font families that draw ``names``, and the names; one that no font can draw becomes ``#NUMBER``."""
    if all(name.isascii() for name in names):
        return [_DEFAULT_FONT], [*names]
    families = {_DEFAULT_FONT: characters_of(_DEFAULT_FONT)}
    missing = {char for name in names for char in name if ord(char) not in families[_DEFAULT_FONT]}
    if missing and (more := _family_with_most(frozenset(missing))) is not None:
        families[more] = characters_of(more)
        missing = {char for char in missing if ord(char) not in families[more]}
    return [*families], [f"#{number}" if missing.intersection(name) else name for number, name in enumerate(names)]


@cache
def _family_with_most(wanted: frozenset[str]) -> str | None:
    """Return the installed font family that has the most of these characters; None if no family has any."""
    others = sorted(installed_families() - {_DEFAULT_FONT})
    counts = {name: sum(ord(char) in characters_of(name) for char in wanted) for name in others}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] else None


def installed_families() -> set[str]:
    """Return the font families with a face of regular weight."""
    usual = {font.name for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")}
    return {name for name in usual if not name.startswith(_PLACEHOLDERS)}


def characters_of(family: str) -> Container[int]:
    """Return the code points that the family has."""
    return FT2Font(fontManager.findfont(FontProperties(family=[family]))).get_charmap()
