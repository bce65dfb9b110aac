"""The evaluation's own key: a report is made again, without a training, when what made it has changed.

Three parts: the sha256 of predictions.json, the code of ``pipeline.evaluation.report`` and what it imports, and the
versions of its libraries. Comments don't count, as they can't change a figure.
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
"""Makes a report: ``python -m``."""

_MAKER = "pipeline.evaluation.report"


def made_of(root: Path, predictions_sha256: str) -> dict[str, Any]:
    """What a report that is made now is made of. Raises OSError, UsageError."""
    code, versions = _means(root)
    return {"predictions": predictions_sha256, "code": dict(code), "environment": dict(versions)}


def made_of_run(folder: RunFolder, root: Path) -> dict[str, Any]:
    """The same for a run whose report is about to be made."""
    path = folder.path / TRAINED[2]
    return made_of(root, sha256_file(path) if path.is_file() else "")


@cache
def _means(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Code and versions, read once: the reports of a process that lives long are made by the code it began with."""
    closure = import_closure(root, _MAKER)
    return dict(closure.digests), environment(closure.versions)


def stale_because(folder: RunFolder, root: Path) -> str | None:
    """None when the report was made of what is there now; otherwise what changed, in a few words."""
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
