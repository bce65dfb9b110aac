"""Stamps of targets that were hashed since result.json was written, and found as they were.

A copied run folder has other inodes and change times than result.json tells, so all of its targets are hashed: once,
as the stamps that they had then lie in stamps.json. Losing that file costs nothing but the hashing.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.stamps import settles_in
from pipeline.runs.result import Fingerprint, changed, stamp

FILE = "stamps.json"


class Stamps:
    """Those of one run folder; ``keep`` writes down what ``changed`` had to hash."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fresh: dict[str, list[Any]] = {}

    def changed(self, name: str, expected: Fingerprint) -> str | None:
        """What happened to a target since its fingerprint was taken, or None."""
        path = self._run_dir / name
        seen = stamp(path)
        if seen is None or seen == expected.stamp:
            return changed(path, expected)
        row = [expected.sha256, *seen]
        if self._known.get(name) == row:
            return None
        why = changed(path, expected)
        if why is None and stamp(path) == seen and not settles_in(seen[-1]):
            self._fresh[name] = row
        return why

    def keep(self) -> None:
        """A folder that can't be written does without."""
        if self._fresh and self._run_dir.is_dir():  # one that was removed meanwhile stays removed
            with suppress(OSError):
                documents.write_sealed(self._run_dir / FILE, {"targets": {**self._known, **self._fresh}})

    @cached_property
    def _known(self) -> dict[str, Any]:
        try:
            found = documents.read_sealed(self._run_dir / FILE).get("targets")
        except (OSError, documents.DamagedError):
            return {}
        return found if isinstance(found, dict) else {}
