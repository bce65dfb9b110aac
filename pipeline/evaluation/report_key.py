"""The key of an evaluation report: if its inputs changed, the report is recreated without a training.

It has three parts: the sha256 of predictions.json, the code of ``pipeline.evaluation.report`` with its imports, and the
versions of its libraries. Comments don't count, because they can't change a figure.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_file
from pipeline.keys.content_key import environment
from pipeline.keys.import_closure import import_closure
from pipeline.runs.folder import EVALUATED, TRAINED, RunFolder

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
