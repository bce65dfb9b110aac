"""Files behind an address that fsspec knows (s3://, gs://, file://, …): put, listed, fetched, removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.data.source import scheme, shown
from pipeline.data.transports import open_filesystem


class ObjectStore:
    """``address`` is a folder there. Every error of a driver is a DataError that names the setting and the address."""

    def __init__(self, address: str, setting: str) -> None:
        """Raises DataError: the protocol isn't known, or its driver isn't installed."""
        self.shown = f"{setting}={shown(address) if scheme(address) else address}"
        self._filesystem, self._root = open_filesystem(address if scheme(address) else f"file://{address}", setting)

    def names(self, folder: str) -> list[str]:
        """Of the files right in ``folder``; none where it isn't there. Raises DataError."""
        with self._explained("listed"):
            self._filesystem.invalidate_cache()  # another computer may have written since
            try:
                found = self._filesystem.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def put(self, source: Path, name: str) -> None:
        """Write a file of this computer there, in place of what has that name. Raises DataError, FileNotFoundError."""
        source.stat()
        with self._explained("written"):
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._filesystem.put_file(str(source), self._path(name))

    def get(self, name: str, target: Path) -> None:
        """Raises DataError: also where it isn't there."""
        with self._explained("read"):
            self._filesystem.get_file(self._path(name), str(target))

    def remove(self, name: str) -> None:
        """A file or a whole folder. Raises DataError: also where it isn't there."""
        with self._explained("removed"):
            self._filesystem.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # drivers have error classes of their own (no credentials, no bucket, …)
            raise DataError(f"{self.shown} can't be {done}: {type(error).__name__}: {error}") from error
