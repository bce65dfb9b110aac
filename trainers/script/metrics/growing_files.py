"""Files of metrics that grow while a script runs: their new lines, and the list of such files below its folders."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

LONGEST_LINE_BYTES = 1 << 20
_PAUSE_FACTOR = 50  # pause until the next listing, in durations of the last one
_SHORT_S = 0.005  # a listing up to this duration needs no pause


class GrowingFile:
    """A file of lines, read from the end of the last call; an unfinished line waits for its end."""

    def __init__(self, path: Path, start_bytes: int = 0, ends: bytes = b"\n") -> None:
        """``ends``: characters that end a line."""
        self.path, self._offset, self._unfinished = path, start_bytes, b""
        self._ends = re.compile(b"[" + ends + b"]")

    def lines(self, until_bytes: int | None = None) -> list[bytes]:
        """Return the complete lines since the last call, up to a position in the file (None: its end).

        A file that was cut is read from its beginning.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._unfinished = 0, b""
                file.seek(self._offset)
                data = file.read(-1 if until_bytes is None else until_bytes - self._offset)
        except OSError:
            return []
        self._offset += len(data)
        *complete, unfinished = self._ends.split(self._unfinished + data)
        self._unfinished = unfinished if len(unfinished) < LONGEST_LINE_BYTES else b""
        return complete

    def last_line(self) -> bytes:
        """Return the text behind the last line's end, when nobody writes any more."""
        line, self._unfinished = self._unfinished, b""
        return line


class FilesBelow:
    """Files of metrics below several folders: ``*.jsonl``, ``*.csv``, TensorBoard's event files.

    A folder may hold a whole data set. A listing that takes long is repeated after fifty times that time.
    """

    def __init__(self, *folders: Path, earlier: Mapping[Path, int] | None = None) -> None:
        """``earlier``: bytes of each file that earlier attempts left; None: the files that exist now."""
        self._folders = [folder for folder in folders if not any(folder in other.parents for other in folders)]
        self._paths: list[Path] = []
        self._next_s = 0.0
        self.refresh()
        self.earlier = {path: path.stat().st_size for path in self.matching("*")} if earlier is None else earlier

    def refresh(self, *, last: bool = False) -> None:
        """List the files again, unless that takes long and was done recently; ``last``: in any case."""
        began_s = time.monotonic()
        if last or began_s >= self._next_s:
            self._paths = sorted(path for folder in self._folders for path in _metric_files(folder))
            took_s = time.monotonic() - began_s
            self._next_s = began_s + (_PAUSE_FACTOR * took_s if took_s > _SHORT_S else 0.0)

    def matching(self, pattern: str) -> list[Path]:
        """Return regular files by path, because opening a pipe would block, and a link may lead nowhere."""
        return [path for path in self._paths if fnmatch(path.name, pattern) and path.is_file()]

    def shown(self, path: Path) -> str:
        """Return the path relative to the folder that contains it."""
        return next(path.relative_to(folder).as_posix() for folder in self._folders if path.is_relative_to(folder))


def _metric_files(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        yield from (Path(top, name) for name in names if name.endswith((".jsonl", ".csv")) or "tfevents" in name)
