"""What earlier calls worked out, each entry under a digest of everything that decides it.

So an entry that is found is the answer, and losing the file costs nothing but the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.files import write_json


class Remembered:
    """The entries of one kind, in ``root/.paceline/<kind>.json``; beyond ``most`` the oldest go first."""

    def __init__(self, root: Path, kind: str, *, most: int) -> None:
        self._path = root / ".paceline" / f"{kind}.json"
        self._most = most

    def __getitem__(self, name: str) -> Any:
        """The entry, or None."""
        return self._entries.get(name)

    def keep(self, entries: Mapping[str, Any]) -> None:
        """Of two commands that write at once the last one's stay; a read-only project does without."""
        self.__dict__.pop("_entries", None)  # others may have written meanwhile
        with suppress(OSError):
            write_json(self._path, dict([*self._entries.items(), *entries.items()][-self._most :]))
        self.__dict__.pop("_entries", None)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
