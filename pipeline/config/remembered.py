"""Compositions of earlier calls, so that a call which finds its run finished needs no Hydra (most of its time).

An entry's name is a digest of the overrides and of the content of everything that a composition is made from, so an
entry that is found is the composition. Losing the file costs one composition.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.files import canonical_json, sha256_bytes, sha256_text, write_json
from pipeline.redact import without_secrets

_MOST = 64  # entries; the oldest go first
_OUTSIDE = ("oc.env", "${now:", "${hydra:")  # what takes a value from elsewhere than conf/ and the words


class Remembered:
    """The compositions remembered for one project. ``root`` is the project's folder."""

    def __init__(self, root: Path, words: Sequence[str]) -> None:
        self._path = root / ".paceline" / "composed.json"
        self._name = _name(root, words)

    def recall(self) -> dict[str, Any] | None:
        """The resolved configuration, or None where these words were not composed before."""
        found = self._all().get(self._name) if self._name else None
        return found if isinstance(found, dict) else None

    def keep(self, resolved: dict[str, Any]) -> None:
        """Of two commands that write at once the last one's stays; a read-only project does without.

        Secrets aren't kept.
        """
        if self._name and json.loads(json.dumps(resolved)) == resolved == without_secrets(resolved):
            entries = [*self._all().items(), (self._name, resolved)][-_MOST:]
            with suppress(OSError):
                write_json(self._path, dict(entries))

    def _all(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}


def _name(root: Path, words: Sequence[str]) -> str | None:
    """None where the words or the files take something from outside."""
    sources = [*root.glob("conf/**/*.yaml"), *root.glob("pipeline/config/*.py"), root / "trainers" / "config.py"]
    texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in sources}
    composed_of = [*words, *(text.decode(errors="replace") for name, text in texts.items() if name.startswith("conf/"))]
    if any(mark in text for mark in _OUTSIDE for text in composed_of) or any("hydra" in word for word in words):
        return None
    made_from = {
        "words": list(words),
        "files": {name: sha256_bytes(text) for name, text in texts.items()},
        "versions": [sys.version, *(importlib.metadata.version(name) for name in ("hydra-core", "omegaconf"))],
    }
    return sha256_text(canonical_json(made_from))
