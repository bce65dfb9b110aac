"""The evaluation of one run for a page: its confusion matrix, and images that it misclassified.

Imports matplotlib and pillow, so it is only imported where a page is rendered.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from pipeline.comparing import drawing
from pipeline.comparing.charts import Cell, level
from pipeline.comparing.reading import ComparedRun
from pipeline.core import documents
from pipeline.evaluation import overview
from pipeline.evaluation.table import Confusion, most_confused
from trainers.contract import run_folder

_MOST_CLASSES = 20  # with more, the cells are too small for numbers
_MOST_IMAGES = 16
_LEAST_PIXELS = 64  # of an image's shorter side on the page: smaller ones are enlarged


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A misclassified image as a ``data:`` address, and its classes."""

    address: str
    true: str
    predicted: str


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """``matrix`` is SVG; '' if there are too many classes. ``split`` and ``n``: the images that were classified."""

    split: str
    n: int
    matrix: str
    confused: tuple[Confusion, ...]
    pictures: tuple[Picture, ...]


def of_run(run: ComparedRun) -> Evaluated | None:
    """Read the run's evaluation; None if there is none, or a file of it is damaged."""
    report = documents.read_or_none(run.folder / run_folder.REPORT)
    predictions = documents.read_or_empty(run.folder / run_folder.PREDICTIONS)
    if report is None or not run.counts:
        return None
    try:
        return Evaluated(
            split=str(report["split"]),
            n=int(report["n"]),
            matrix=_matrix(report) if len(report["classes"]) <= _MOST_CLASSES else "",
            confused=tuple(most_confused(report)),
            pictures=_pictures(run, report, predictions),
        )
    except (KeyError, TypeError, ValueError, IndexError, OSError):
        return None


def _matrix(report: Mapping[str, Any]) -> str:
    """Draw the confusion matrix, each row shaded by its shares."""
    cells, classes = [], report["classes"]
    for row, counts in enumerate(report["confusion_matrix"]):
        total = sum(counts) or 1
        for column, count in enumerate(counts):
            said = f"{classes[row]} taken for {classes[column]}: {count:,} of {total:,}"
            title, shade = said if row != column else "", level(count / total) if count else None
            cells.append(Cell(row=row, column=column, lines=(f"{count:,}" * bool(count),), level=shade, title=title))
    return drawing.cells(classes, classes, cells, about=("true", "predicted", "images"))


def _pictures(run: ComparedRun, report: Mapping[str, Any], predictions: Mapping[str, Any]) -> tuple[Picture, ...]:
    mistakes = overview.worst(predictions.get("targets") or [], predictions.get("predictions") or [], _MOST_IMAGES)
    shown = overview.images(run.folder / "data", str(report["split"]), mistakes)
    classes = [str(name) for name in report["classes"]]
    return tuple(
        Picture(address=_address(image), true=classes[mistake.true], predicted=classes[mistake.predicted])
        for mistake, image in zip(mistakes, shown, strict=False)
    )


def _address(image: Image.Image) -> str:
    times = max(1, -(-_LEAST_PIXELS // min(image.size)))
    larger = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    larger.save(buffer, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
