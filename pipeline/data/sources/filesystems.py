"""Access to fsspec addresses (s3://, gs://, sftp://, …): drivers, logins, and one-line errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.core.errors import DataError
from pipeline.core.redact import hide, of_environment
from pipeline.data.sources.source import WEB, is_local, scheme, shown
from trainers.core.errors import install

_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_S3 = "AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), AWS_ENDPOINT_URL=… unless it is Amazon's"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS=FILE, or gcloud auth application-default login"
_LOGINS = {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE}


def protocol(url: str) -> str:
    """Return the protocol of the innermost driver: s3 for ``simplecache::s3``."""
    return scheme(url).rpartition("::")[2]


def open_filesystem(url: str, setting: str = "dataset.source") -> tuple[Any, str]:
    """Return the filesystem of an address, and the path in it. Raises DataError that names the setting."""
    if protocol(url) in _LOGINS and "@" in urlsplit(url).netloc:
        raise DataError(
            f"{setting}={shown(url)}: an address with {protocol(url)}:// holds no login", hint=_LOGINS[protocol(url)]
        )
    with _fsspec(url, setting) as fsspec:
        # the protocol as scheme() writes it, in lower case: fsspec knows no other
        return fsspec.core.url_to_fs(f"{scheme(url)}://{url.partition('://')[2]}")  # type: ignore[no-any-return]


def refuse_protocol(source: str) -> None:
    """Refuse an address whose protocol can't be read here, without connecting. Raises DataError."""
    if is_local(source) or scheme(source) in WEB:
        return
    with _fsspec(source, "dataset.source") as fsspec:
        for name in scheme(source).split("::"):
            fsspec.get_filesystem_class(name)


def reason_of(error: Exception) -> str:
    """Return a driver's error on one line without secrets; each driver has its own error classes."""
    text = hide(str(error), of_environment(os.environ))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def login_hint(url: str, error: Exception) -> str | None:
    """Return the hint about credentials if they are the cause of the error."""
    refused = isinstance(error, PermissionError) or "credentials" in str(error).lower()
    return _LOGINS.get(protocol(url)) if refused else None


@contextmanager
def _fsspec(url: str, setting: str) -> Iterator[Any]:
    """Yield the module; convert its errors about protocols to DataError with the fix."""
    import fsspec  # takes 0.1 s to load, and most sources are local

    try:
        yield fsspec
    except ImportError as error:
        name = protocol(url)
        raise DataError(
            f"{setting}={shown(url)}: the driver of {name}:// is not installed ({error})",
            hint=install(_DRIVERS.get(name, f"'fsspec[{name}]'")),
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{setting}={shown(url)}: {error}; protocols: http, https, {known}") from error


class ObjectStore:
    """A folder at ``address``. Every driver error becomes a DataError that names the setting and the address."""

    def __init__(self, address: str, setting: str) -> None:
        """Open the store. Raises DataError: an unknown protocol, or its driver isn't installed."""
        self.named = f"{setting}={shown(address) if scheme(address) else address}"
        self._url = address if scheme(address) else f"file://{address}"
        self._filesystem, self._root = open_filesystem(self._url, setting)

    def names(self, folder: str) -> list[str]:
        """List the files directly in ``folder``; empty if it doesn't exist.

        Raises DataError, also for a missing bucket.
        """
        with self._explained("listed"):
            self._filesystem.invalidate_cache()  # another host may have written since
            try:
                paths = self._filesystem.ls(self._path(folder), detail=False)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):  # S3's message; a missing folder is no error there
                    raise
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def try_writing(self, name: str) -> None:
        """Write a small file of that name and remove it. Raises DataError: that fails."""
        with self._explained("written"):
            self._make_folder_of(name)
            self._filesystem.pipe_file(self._path(name), b"tried")
            self._filesystem.rm(self._path(name))

    def put(self, source: Path, name: str) -> None:
        """Upload a local file, replacing a file of that name. Raises DataError, FileNotFoundError."""
        source.stat()
        with self._explained("written"):
            self._make_folder_of(name)
            self._filesystem.put_file(str(source), self._path(name))

    def get(self, name: str, target: Path) -> None:
        """Download a file. Raises FileNotFoundError if it doesn't exist, DataError if it can't be read or written."""
        with self._explained("read"):
            try:
                self._filesystem.get_file(self._path(name), str(target))
                return
            except FileNotFoundError as error:
                missing = error
        # not inside of _explained, which would make it a DataError
        raise FileNotFoundError(f"{name} isn't there") from missing

    def below(self) -> dict[str, int]:
        """Return path → bytes of all files below the address, at any depth. Raises DataError."""
        with self._explained("listed"):
            entries = self._filesystem.find(self._root, detail=True)
        top = len(self._root.rstrip("/")) + 1
        return {path[top:]: int(about.get("size") or 0) for path, about in sorted(entries.items())}

    def get_below(self, names: Sequence[str], folder: Path) -> None:
        """Download files of ``below`` to the same paths in ``folder``, concurrently if the driver can.

        Raises:
            DataError: a file can't be read.
            OSError: a file can't be written.
        """
        targets = [folder / name for name in names]
        for path in {target.parent for target in targets}:
            path.mkdir(parents=True, exist_ok=True)
        with self._explained("read"):
            self._filesystem.get([self._path(name) for name in names], [*map(str, targets)])

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder. Raises DataError, also if it doesn't exist."""
        with self._explained("removed"):
            self._filesystem.rm(self._path(name), recursive=True)

    def _make_folder_of(self, name: str) -> None:
        if protocol(self._url) not in _DRIVERS:  # in an object store a mistyped name would create a bucket
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # drivers have error classes of their own
            raise DataError(
                f"{self.named} can't be {done}: {reason_of(error)}", hint=login_hint(self._url, error)
            ) from error
