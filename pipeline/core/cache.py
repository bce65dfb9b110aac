"""What earlier calls worked out, each entry under a digest of everything that decides it.

So an entry that is found is the answer, and losing the file costs nothing but the work. A file that was damaged is as
good as lost: it begins with a digest of what follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_text, write_atomic

FOLDER = ".paceline"
_END = "]\n"
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
            write_atomic(self._path, _written(dict([*self._entries.items(), *entries.items()][-self._most :])))
        self.__dict__.pop("_entries", None)

    @cached_property
    def _entries(self) -> dict[str, Any]:
        try:
            stat = self._path.stat()
            return _read(self._path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except (OSError, ValueError, RecursionError):
            return {}


def _written(entries: Mapping[str, Any]) -> str:
    """A list of two: the digest of all lines behind it, and the entries."""
    lines = json.dumps(entries, indent=2) + _END
    return f"{_head(lines)}\n{lines}"


def _head(lines: str) -> str:
    return f'["{sha256_text(lines)}",'


@lru_cache(maxsize=8)
def _read(path: Path, mtime_ns: int, size: int, inode: int) -> dict[str, Any]:
    """Once a version of the file; not to be changed. Raises OSError, ValueError."""
    head, _, lines = path.read_text(encoding="utf-8").partition("\n")
    if head != _head(lines):
        return {}
    entries: dict[str, Any] = json.loads(lines.removesuffix(_END))
    return entries
