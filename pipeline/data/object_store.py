"""Files behind an address that fsspec knows (s3://, gs://, file://, …): put, listed, fetched, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.data.filesystems import has_folders, login_hint, open_filesystem, said
from pipeline.data.source import scheme, shown


class ObjectStore:
    """``address`` is a folder there. Every error of a driver is a DataError that names the setting and the address."""

    def __init__(self, address: str, setting: str) -> None:
        """Raises DataError: the protocol isn't known, or its driver isn't installed."""
        self.shown = f"{setting}={shown(address) if scheme(address) else address}"
        self._url = address if scheme(address) else f"file://{address}"
        self._filesystem, self._root = open_filesystem(self._url, setting)

    def names(self, folder: str) -> list[str]:
        """Of the files right in ``folder``; none where it isn't there. Raises DataError: also without its bucket."""
        with self._explained("listed"):
            self._filesystem.invalidate_cache()  # another computer may have written since
            try:
                found = self._filesystem.ls(self._path(folder), detail=False)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):  # S3's words; a folder there needs nobody to make it
                    raise
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def try_writing(self, name: str) -> None:
        """Write a small file of that name there and remove it. Raises DataError: that isn't possible."""
        with self._explained("written"):
            self._make_folder_of(name)
            self._filesystem.pipe_file(self._path(name), b"tried")
            self._filesystem.rm(self._path(name))

    def put(self, source: Path, name: str) -> None:
        """Write a file of this computer there, in place of what has that name. Raises DataError, FileNotFoundError."""
        source.stat()
        with self._explained("written"):
            self._make_folder_of(name)
            self._filesystem.put_file(str(source), self._path(name))

    def get(self, name: str, target: Path) -> None:
        """Raises FileNotFoundError: it isn't there. DataError: it can't be read now, or not be written here."""
        with self._explained("read"):
            try:
                self._filesystem.get_file(self._path(name), str(target))
                return
            except FileNotFoundError as error:
                missing = error
        raise FileNotFoundError(f"{name} isn't there") from missing

    def below(self) -> dict[str, int]:
        """The bytes of every file there, at any depth, by its path below the address. Raises DataError."""
        with self._explained("listed"):
            found = self._filesystem.find(self._root, detail=True)
        top = len(self._root.rstrip("/")) + 1
        return {path[top:]: int(about.get("size") or 0) for path, about in sorted(found.items())}

    def get_below(self, names: Sequence[str], folder: Path) -> None:
        """Those files of ``below``, at the same places in ``folder``; side by side where the driver can.

        Raises:
            DataError: one can't be read. OSError: one can't be written.
        """
        targets = [folder / name for name in names]
        for path in {target.parent for target in targets}:
            path.mkdir(parents=True, exist_ok=True)
        with self._explained("read"):
            self._filesystem.get([self._path(name) for name in names], [*map(str, targets)])

    def remove(self, name: str) -> None:
        """A file or a whole folder. Raises DataError: also where it isn't there."""
        with self._explained("removed"):
            self._filesystem.rm(self._path(name), recursive=True)

    def _make_folder_of(self, name: str) -> None:
        if has_folders(self._url):
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # drivers have error classes of their own
            raise DataError(
                f"{self.shown} can't be {done}: {said(error)}", hint=login_hint(self._url, error)
            ) from error
