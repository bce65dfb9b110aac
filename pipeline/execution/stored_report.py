"""The evaluation report of a classifier's run, report.json: whether it is out of date, its making in another process
(``pipeline.evaluation``), and its table.

A report is up to date while the field ``made_of`` in report.json is what a new one would have: digests of
predictions.json and of the code of ``pipeline.evaluation.report`` with its imports, and the versions of its libraries.
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
from pipeline.keys.content_key import differences, environment
from pipeline.keys.import_closure import import_closure
from pipeline.runs.folder import EVALUATED, RunFolder
from pipeline.runs.lock import locked
from pipeline.runs.result import why_altered
from trainers.contract import run_folder

PROGRAM = "pipeline.evaluation"
"""The module that creates a report with ``python -m``."""

_MAKER = "pipeline.evaluation.report"


def made_of(folder: RunFolder, root: Path) -> dict[str, Any]:
    """Return what the report of a run would be made of now. Raises OSError, UsageError."""
    path = folder.path / run_folder.PREDICTIONS
    return {"predictions": sha256_file(path) if path.is_file() else "", **_code_and_versions(root)}


@cache
def _code_and_versions(root: Path) -> dict[str, dict[str, str]]:
    """Return the code and versions of the report's maker, read once: a process makes all reports with the same code."""
    closure = import_closure(root, _MAKER)
    return {"code": dict(closure.digests), "environment": environment(closure.versions)}


def stale_because(folder: RunFolder, root: Path) -> str | None:
    """Return why a run's report is out of date, in a few words; None if it isn't."""
    if not folder.program.evaluated:
        return None
    report = folder.read_json(run_folder.REPORT)
    if report is None:
        return f"{run_folder.REPORT} is missing"
    old = report.get("made_of")
    if not isinstance(old, dict):
        return f"{run_folder.REPORT} does not say what it was made of"
    recorded = folder.recorded_files().get(run_folder.PREDICTIONS)
    digest = recorded.sha256 if recorded is not None else sha256_file(folder.path / run_folder.PREDICTIONS)
    changes = [f"{run_folder.PREDICTIONS} changed"] if old.get("predictions") != digest else []
    changes += map(str, differences(old, _code_and_versions(root)))
    return f"the evaluation was made with other means: {', '.join(changes)}" if changes else None


def make(folder: RunFolder, root: Path) -> None:
    """Make a run's report in another process: scikit-learn and matplotlib are large. Raises PacelineError."""
    argv = [sys.executable, "-m", PROGRAM, str(folder.path), json.dumps(made_of(folder, root))]
    done = process.run(argv, env=rank_environment.for_evaluation(os.environ, root), timeout_s=300.0)
    if done.code != 0:
        hint = "the same command again" if done.code < 0 else None
        raise PacelineError(f"the evaluation report of {folder.key} failed: {done.why}", hint=hint)


def renew(folder: RunFolder, root: Path, say: Callable[[str], None]) -> None:
    """Make a run's report again unless it is intact and up to date. Raises PacelineError."""
    if not folder.program.evaluated:
        raise UsageError(
            f"{folder.key} is the run of a script, and reports are made of classifier runs only", hint="doit ui"
        )
    predictions = folder.path / run_folder.PREDICTIONS
    if not predictions.exists():
        make(folder, root)  # which raises an error that names what is missing
    with locked(folder, say):
        folder.read_result()  # raises if the result was altered
        recorded = folder.recorded_files()
        expected = recorded.get(run_folder.PREDICTIONS)
        if expected is not None and (why := why_altered(predictions, expected)):
            raise folder.altered_error(run_folder.PREDICTIONS, why)
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
    confused = []
    for pair in most_confused(report):
        classes = f"  {printable(pair['true'])} taken for {printable(pair['predicted'])}"
        confused.append((classes, f"{pair['count']:,} of {pair['of']:,}"))
    if confused:
        lines += ["most confused", *aligned(confused).splitlines()]
    return "\n".join(lines)


def most_confused(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs of classes that were confused most often, as ``true``, ``predicted``, ``count`` and ``of``:
    ``count`` of the ``of`` images of class ``true`` were taken for ``predicted``."""
    names = [*report["per_class"]]
    pairs = [
        {"true": names[true], "predicted": names[predicted], "count": count, "of": sum(row)}
        for true, row in enumerate(report["confusion_matrix"])
        for predicted, count in enumerate(row)
        if predicted != true and count
    ]
    return sorted(pairs, key=lambda pair: -pair["count"])[:_MOST_CONFUSED]
