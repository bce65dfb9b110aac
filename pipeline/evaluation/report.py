"""The evaluation of a finished run: accuracy, figures per class, confusion matrix, as numbers and as a picture.

Imports scikit-learn and matplotlib, which are large, so ``python -m pipeline.evaluation`` runs it in a separate
process.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.metrics import classification_report, confusion_matrix

from pipeline.core import documents
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic, write_json
from pipeline.evaluation import overview
from trainers.contract import run_folder

Report = dict[str, Any]
"""Content of evaluation/report.json.

``accuracy`` (0..1), ``n`` (images), ``split``, ``classes`` (names), ``synthetic``, ``per_class`` (name → precision,
recall, f1-score, support), ``macro avg`` and ``weighted avg`` (the same four), ``confusion_matrix`` (counts; rows =
true class, columns = predicted), ``weights_sha256``, ``dataset_digest``, ``made_of`` (``stored_report.made_of``).
"""

_AVERAGES = ("macro avg", "weighted avg")
_MAX_NUMBERED_CLASSES = 25  # with more classes, the cells are too small for numbers
_MAX_LABEL = 28  # characters of a class name on an axis


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The inputs from the run folder: parallel lists of class numbers, and the class names."""

    split: str
    targets: list[int]
    predictions: list[int]
    classes: list[str]
    synthetic: bool
    summary: Mapping[str, Any]


def evaluate(run_dir: Path, made_of: Mapping[str, Any]) -> Report:
    """Create evaluation/report.json, confusion_matrix.png and overview.png from predictions.json.

    Raises:
        PacelineError: predictions.json or the data manifest is missing or invalid.
        OSError: the results can't be written.
    """
    outcome = _read(run_dir)
    report = {**_report(outcome), "made_of": made_of}
    write_atomic(run_dir / run_folder.CONFUSION_MATRIX, _picture(report))
    write_atomic(run_dir / overview.FILE, overview.picture(report, run_dir, outcome.targets, outcome.predictions))
    # Written last, so that its presence implies the pictures.
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
    _check_numbers(where, [*targets, *predicted], len(classes), again)
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


def _check_numbers(where: Path, numbers: Sequence[Any], count: int, hint: str) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < count:
            raise PacelineError(f"{where}: {number!r} is no class; the data has 0..{count - 1}", hint=hint)


# --------------------------------------------------------------------------------------- figures
def _report(outcome: _Outcome) -> Report:
    numbers = list(range(len(outcome.classes)))
    table = classification_report(
        outcome.targets, outcome.predictions, labels=numbers, output_dict=True, zero_division=0.0
    )
    right = sum(map(int.__eq__, outcome.targets, outcome.predictions))
    return {
        "split": outcome.split,
        "accuracy": right / len(outcome.targets),
        "n": len(outcome.targets),
        "synthetic": outcome.synthetic,
        "classes": outcome.classes,
        "per_class": {_unique(outcome.classes, number): table[str(number)] for number in numbers},
        **{name: table[name] for name in _AVERAGES},
        "confusion_matrix": confusion_matrix(outcome.targets, outcome.predictions, labels=numbers).tolist(),
        "weights_sha256": outcome.summary.get("weights_sha256"),
        "dataset_digest": outcome.summary.get("dataset_digest"),
    }


def _unique(classes: Sequence[str], number: int) -> str:
    """Return the class's name, with its number if two classes share the name."""
    name = classes[number]
    return name if classes.count(name) == 1 else f"{name} ({number})"


# --------------------------------------------------------------------------------------- picture
def _picture(report: Report) -> bytes:
    """Return a PNG: shades are shares of the true class, numbers are counts. Equal reports give equal bytes."""
    families, names = overview.drawable(report["classes"])
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
    _label(axes, report["classes"])
    if len(matrix) <= _MAX_NUMBERED_CLASSES:
        _write_counts(axes, matrix, shares)
    title = f"{report['split']} accuracy {report['accuracy']:.2%}  ·  n = {report['n']:,}"
    axes.set_title(title, fontsize=12, pad=10)
    if report["synthetic"]:
        axes.annotate(
            "SYNTHETIC DATA – this accuracy means nothing",
            (0.5, 1.0),
            xycoords="axes fraction",
            xytext=(0, 34),
            textcoords="offset points",
            ha="center",
            color="#b00020",
            fontsize=12,
            weight="bold",
        )


def _label(axes: Axes, classes: Sequence[str]) -> None:
    every = -(-len(classes) // 50)  # at most 50 names fit along an axis
    shown = range(0, len(classes), every)
    names = [classes[at] if len(classes[at]) <= _MAX_LABEL else classes[at][: _MAX_LABEL - 1] + "…" for at in shown]
    slanted = max(map(len, names)) > 3
    axes.set_xticks(shown, names, rotation=40 if slanted else 0, ha="right" if slanted else "center", parse_math=False)
    axes.set_yticks(shown, names, parse_math=False)
    axes.tick_params(length=0, labelsize=9)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.spines[:].set_visible(False)
    edges = [at - 0.5 for at in range(1, len(classes))]
    if len(classes) <= _MAX_NUMBERED_CLASSES:
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)


def _write_counts(axes: Axes, matrix: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]) -> None:
    for y, row in enumerate(matrix):
        for x, cell in enumerate(row):
            colour = "white" if shares[y][x] > 0.55 else "#1b2a3a" if cell else "#b8c4d0"
            axes.text(x, y, f"{cell}", ha="center", va="center", color=colour, fontsize=9)
