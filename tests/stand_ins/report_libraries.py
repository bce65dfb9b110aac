"""The few functions of scikit-learn and matplotlib that the evaluation report calls: true figures, an empty picture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import IO


class _Rows(list[list[int]]):
    def tolist(self) -> list[list[int]]:
        return self


def confusion_matrix(targets: Sequence[int], predictions: Sequence[int], labels: Sequence[int]) -> _Rows:
    pairs = list(zip(targets, predictions, strict=True))
    return _Rows([[pairs.count((true, told)) for told in labels] for true in labels])


def classification_report(
    targets: Sequence[int], predictions: Sequence[int], labels: Sequence[int], **_: object
) -> dict[str, dict[str, float]]:
    rows = {}
    for label in labels:
        right = sum(true == told == label for true, told in zip(targets, predictions, strict=True))
        precision, recall = right / max(predictions.count(label), 1), right / max(targets.count(label), 1)
        f1 = 2 * precision * recall / ((precision + recall) or 1.0)
        rows[str(label)] = {"precision": precision, "recall": recall, "f1-score": f1, "support": targets.count(label)}
    supports = [targets.count(label) for label in labels]
    for name, weights in (("macro avg", [1] * len(labels)), ("weighted avg", supports)):
        total = sum(weights)
        rows[name] = {
            field: sum(weight * rows[str(label)][field] for weight, label in zip(weights, labels, strict=True)) / total
            for field in ("precision", "recall", "f1-score")
        } | {"support": len(targets)}
    return rows


class Figure:
    """Takes whatever is drawn and leaves the first bytes of a PNG."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Figure:
        return self

    def __call__(self, *_: object, **__: object) -> Figure:
        return self

    def __getitem__(self, key: object) -> Figure:
        return self

    def savefig(self, file: IO[bytes], **_: object) -> None:
        file.write(b"\x89PNG\r\n\x1a\n")


_MODULES: dict[str, dict[str, object]] = {
    "sklearn": {},
    "sklearn.metrics": {"classification_report": classification_report, "confusion_matrix": confusion_matrix},
    "matplotlib": {"rc_context": lambda _: contextlib.nullcontext()},
    "matplotlib.axes": {"Axes": Figure},
    "matplotlib.figure": {"Figure": Figure},
    "matplotlib.font_manager": {"FontProperties": Figure, "fontManager": Figure()},
    "matplotlib.ft2font": {"FT2Font": Figure},
    "matplotlib.backends": {},
    "matplotlib.backends.backend_agg": {"FigureCanvasAgg": Figure},
}


def install() -> None:
    """Let every later import find these in the libraries' places."""
    for name, content in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(content | {"__path__": []})
        sys.modules[name] = module
