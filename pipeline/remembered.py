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

FOLDER = ".paceline"
_places: dict[Path, Path] = {}


def remember_in(root: Path, runs_dir: Path) -> None:
    """From here on what is worked out for the project ``root`` lies with its runs: nothing else need be writable."""
    _places[root] = runs_dir


class Remembered:
    """The entries of one kind, in ``.paceline/<kind>.json`` of the folder that ``remember_in`` named, else of ``root``.

    Beyond ``most`` the oldest go first.
    """

    def __init__(self, root: Path, kind: str, *, most: int) -> None:
        self._path = _places.get(root, root) / FOLDER / f"{kind}.json"
        self._most = most

    def __getitem__(self, name: str) -> Any:
        """The entry, or None."""
        return self._entries.get(name)

    def keep(self, entries: Mapping[str, Any]) -> None:
        """Of two commands that write at once the last one's stay; a folder that can't be written does without."""
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
