"""Addresses that fsspec knows (s3://, gs://, sftp://, …): their drivers, logins, and errors in one line."""

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
from trainers.core.installer import install

_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_S3 = "AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), AWS_ENDPOINT_URL=… unless it is Amazon's"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS=FILE, or gcloud auth application-default login"
_LOGINS = {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE}


def protocol(url: str) -> str:
    """``simplecache::s3`` is read by the driver of s3."""
    return scheme(url).rpartition("::")[2]


def has_folders(url: str) -> bool:
    """Whether files need a folder that is there; a store of objects would make a bucket of a name that is mistyped."""
    return protocol(url) not in _DRIVERS


def open_filesystem(url: str, setting: str = "dataset.source") -> tuple[Any, str]:
    """The filesystem behind an address, and the path in it. Raises DataError that names the setting."""
    if protocol(url) in _LOGINS and "@" in urlsplit(url).netloc:
        raise DataError(
            f"{setting}={shown(url)}: an address with {protocol(url)}:// holds no login", hint=_LOGINS[protocol(url)]
        )
    with _fsspec(url, setting) as fsspec:
        return fsspec.core.url_to_fs(f"{scheme(url)}://{url.partition('://')[2]}")  # type: ignore[no-any-return]


def refuse_protocol(source: str) -> None:
    """Raises DataError where an address can't be read here, whatever answers there."""
    if is_local(source) or scheme(source) in WEB:
        return
    with _fsspec(source, "dataset.source") as fsspec:
        for name in scheme(source).split("::"):
            fsspec.get_filesystem_class(name)


def said(error: Exception) -> str:
    """What a driver says (each has error classes of its own), in one line and without secrets."""
    text = hide(str(error), of_environment(os.environ))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def login_hint(url: str, error: Exception) -> str | None:
    """Where the login comes from, if that is what is wrong."""
    refused = isinstance(error, PermissionError) or "credentials" in str(error).lower()
    return _LOGINS.get(protocol(url)) if refused else None


@contextmanager
def _fsspec(url: str, setting: str) -> Iterator[Any]:
    """The module; what it says of a protocol is a DataError, with the fix."""
    import fsspec  # not before: for an address of such a store alone

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
                paths = self._filesystem.ls(self._path(folder), detail=False)
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):  # S3's words; a folder there needs nobody to make it
                    raise
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

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
            entries = self._filesystem.find(self._root, detail=True)
        top = len(self._root.rstrip("/")) + 1
        return {path[top:]: int(about.get("size") or 0) for path, about in sorted(entries.items())}

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
