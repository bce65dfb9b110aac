"""The evaluation report of a run: its making, its key, by which it is made again without a training, and its table. The
key: predictions.json, the code of ``pipeline.evaluation.report`` with its imports, and its libraries' versions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import sha256_file
from pipeline.core.printable import printable
from pipeline.core.processes import process
from pipeline.core.tables import aligned, columns, padded
from pipeline.keys import rank_environment
from pipeline.keys.content_key import environment
from pipeline.keys.import_closure import import_closure
from pipeline.runs.folder import EVALUATED, TRAINED, RunFolder
from pipeline.runs.lock import locked
from pipeline.runs.result import why_altered

PROGRAM = "pipeline.evaluation"
"""The module that creates a report with ``python -m``."""

_MAKER = "pipeline.evaluation.report"


def made_of(root: Path, predictions_sha256: str) -> dict[str, Any]:
    """Return the key of a report that would be created now. Raises OSError, UsageError."""
    code, versions = _means(root)
    return {"predictions": predictions_sha256, "code": dict(code), "environment": dict(versions)}


def made_of_run(folder: RunFolder, root: Path) -> dict[str, Any]:
    """Return the key for a run whose report is about to be created."""
    path = folder.path / TRAINED[2]
    return made_of(root, sha256_file(path) if path.is_file() else "")


@cache
def _means(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return code and versions, read once: a long-lived process creates all reports with the code it started with."""
    closure = import_closure(root, _MAKER)
    return dict(closure.digests), environment(closure.versions)


def stale_because(folder: RunFolder, root: Path) -> str | None:
    """Return what changed since the report was created, in a few words; None if nothing."""
    if not folder.program.evaluated:
        return None
    report = folder.read_json(EVALUATED[0])
    if report is None:
        return f"{EVALUATED[0]} is missing"
    old = report.get("made_of")
    if not isinstance(old, dict):
        return f"{EVALUATED[0]} does not say what it was made of"
    known = folder.recorded_files().get(TRAINED[2])
    digest = known.sha256 if known is not None else sha256_file(folder.path / TRAINED[2])
    changes = _changes(old, made_of(root, digest))
    return f"the evaluation was made with other means: {', '.join(changes)}" if changes else None


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    changes = ["predictions.json changed"] if old.get("predictions") != new["predictions"] else []
    for part, words in (("code", "{name} changed"), ("environment", "{name} {old} → {new}")):
        before, after = old.get(part), new[part]
        before = before if isinstance(before, dict) else {}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                changes.append(words.format(name=name, old=before.get(name), new=after.get(name)))
    return changes


def make(folder: RunFolder, root: Path) -> None:
    """Make the scikit-learn report in a separate process, so the controller stays small. Raises PacelineError."""
    made_of = made_of_run(folder, root)
    argv = [sys.executable, "-m", PROGRAM, str(folder.path), json.dumps(made_of)]
    done = process.run(argv, env=rank_environment.of_report(os.environ, root), timeout_s=300.0)
    if done.code != 0:
        hint = "the same command again" if done.code < 0 else None
        raise PacelineError(f"the evaluation report of {folder.key} failed: {done.why}", hint=hint)


def renew(folder: RunFolder, root: Path, say: Callable[[str], None]) -> None:
    """Make a run's report again unless it is intact and up to date. Raises PacelineError."""
    if not folder.program.evaluated:
        raise UsageError(
            f"{folder.key} is the run of a script, and reports are made of classifier runs only", hint="doit ui"
        )
    predictions = TRAINED[2]
    if not (folder.path / predictions).exists():
        make(folder, root)  # it names what is missing
    with locked(folder, say):
        folder.read_result()  # raises if the result was altered
        recorded = folder.recorded_files()
        if predictions in recorded and (why := why_altered(folder.path / predictions, recorded[predictions])):
            raise folder.altered(predictions, why)
        intact = all(name in recorded and why_altered(folder.path / name, recorded[name]) is None for name in EVALUATED)
        if not intact or stale_because(folder, root) is not None:
            make(folder, root)
            folder.refresh_fingerprints()


# ------------------------------------------------------------------------------------------ as a table
_AVERAGES = ("macro avg", "weighted avg")
_MOST_CONFUSED = 5  # pairs of classes that are named


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
        said = [
            (
                f"  {printable(pair['true'])} taken for {printable(pair['predicted'])}",
                f"{pair['count']:,} of {pair['of']:,}",
            )
            for pair in confused
        ]
        lines += ["most confused", *aligned(said).splitlines()]
    return "\n".join(lines)


def most_confused(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs of classes that were confused most often: ``count`` ``of`` the images of class ``true``."""
    names = [*report["per_class"]]
    pairs = [
        {"true": names[true], "predicted": names[predicted], "count": count, "of": sum(row)}
        for true, row in enumerate(report["confusion_matrix"])
        for predicted, count in enumerate(row)
        if predicted != true and count
    ]
    return sorted(pairs, key=lambda pair: -pair["count"])[:_MOST_CONFUSED]
