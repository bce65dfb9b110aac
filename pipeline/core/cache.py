"""A cache of computed results between commands: name → JSON value, one file a kind of result.

The caller's name for an entry is a digest of everything that the result depends on, so an entry is never outdated.
Losing a file only costs recomputation. It begins with a digest of its content, so a damaged file counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_text, write_atomic

FOLDER = ".paceline"
_END = "]\n"  # the file is a JSON list: the digest of the entries' text, then the entries
_parents: dict[Path, Path] = {}  # project → the folder that holds its cache, if not the project


def remember_in(root: Path, runs_dir: Path) -> None:
    """Place the cache of project ``root`` in ``runs_dir`` from now on, so that no other folder must be writable."""
    _parents[root] = runs_dir


class Cache:
    """The cache entries of one kind, in ``.paceline/<kind>.json``; beyond ``most`` entries the oldest are dropped."""

    def __init__(self, root: Path, kind: str, *, most: int) -> None:
        self._path = _parents.get(root, root) / FOLDER / f"{kind}.json"
        self._most = most

    def get(self, name: str) -> Any:
        """Return the entry, or None."""
        return self._entries().get(name)

    def keep(self, entries: Mapping[str, Any]) -> None:
        """Add entries. If two commands write at once, the last one wins; an unwritable folder is ignored."""
        with suppress(OSError):
            newest = dict([*self._entries().items(), *entries.items()][-self._most :])
            lines = json.dumps(newest, indent=2) + _END
            write_atomic(self._path, f"{_head(lines)}\n{lines}")

    def _entries(self) -> dict[str, Any]:
        try:
            stat = self._path.stat()
            return _read(self._path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except (OSError, ValueError, RecursionError):
            return {}


def _head(lines: str) -> str:
    """Return the first line of the file, for all lines after it."""
    return f'["{sha256_text(lines)}",'


@lru_cache(maxsize=8)
def _read(path: Path, mtime_ns: int, size: int, inode: int) -> dict[str, Any]:
    """Read one version of the file; callers must not modify the result. Raises OSError, ValueError."""
    head, _, lines = path.read_text(encoding="utf-8").partition("\n")
    if head != _head(lines):
        return {}
    entries: dict[str, Any] = json.loads(lines.removesuffix(_END))
    return entries
