"""The text of ``dataset.source``, a path or an address: its protocol, its local path, how messages show it.

The second half opens addresses of fsspec's protocols (s3://, sftp://, …), for the mirror of checkpoints too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from pipeline.core.errors import DataError
from pipeline.core.files import expanded
from pipeline.core.redact import hide, secrets_of_environment
from trainers.core.errors import install

WEB = ("http", "https")
_LOCAL = ("file", "local")  # fsspec accepts both names
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_S3 = "AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), AWS_ENDPOINT_URL=… unless it is Amazon's"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS=FILE, or gcloud auth application-default login"
_LOGINS = {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE}


def scheme(source: str) -> str:
    """Return the lower-case text before ``://``; empty for a path."""
    return source.partition("://")[0].lower() if "://" in source else ""


def is_local(source: str) -> bool:
    """Return True for a path or a file:// URL."""
    return scheme(source) in ("", *_LOCAL)


def local_path(source: str | None) -> Path | None:
    """Return the absolute path of a plain path or file:// URL; None for other URLs and no source. Raises DataError."""
    if source is None:
        return None
    if scheme(source) in _LOCAL:
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise DataError(
                f"dataset.source={source}: {parts.netloc} is taken for a host there, and files are read here",
                hint=f"dataset.source=file:///{parts.netloc}{parts.path}, or the path alone",
            )
        return Path(unquote(parts.path))
    return None if scheme(source) else Path(os.path.normpath(expanded(source, f"dataset.source={source}").absolute()))


def refuse_special(source: str | None, path: Path) -> None:
    """Refuse missing and special files: reading a FIFO or a device may never end. Raises DataError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        text = f"dataset.source={source}: {path} does not exist"
        raise DataError(text, hint="dataset.source=<a file that is there>") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise DataError(f"dataset.source={source}: {path} is {kind}; wanted: a file")


def files_below(folder: Path) -> dict[str, Path]:
    """Return all files below a folder by their relative paths, sorted. Raises OSError."""
    return {file.relative_to(folder).as_posix(): file for file in sorted(walked(folder)) if file.is_file()}


def walked(folder: Path, parents: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield everything below a folder except folders. Follows links to folders, as readers may do. Raises OSError.

    ``parents``: real paths of the parent folders up to the start of the walk.
    """
    real_path = os.path.realpath(folder)
    if real_path in parents:  # a link to a parent folder, which would never end
        return
    with suppress(PermissionError):  # unreadable for every process of this user
        for path in folder.iterdir():
            if path.is_dir():
                yield from walked(path, (*parents, real_path))
            else:
                yield path


def without_login(url: str) -> str:
    """Return the address without user, password, query and fragment, which may hold secrets (signed URLs)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def file_name(url: str) -> str:
    """Return the last part of a URL's path; empty for a folder that ends in a slash."""
    return unquote(urlsplit(url).path).rpartition("/")[2]


# --------------------------------------------------------------- fsspec addresses: s3://, gs://, sftp://, …
def protocol(url: str) -> str:
    """Return the protocol of the innermost driver: s3 for ``simplecache::s3``."""
    return scheme(url).rpartition("::")[2]


def open_filesystem(url: str, setting: str = "dataset.source") -> tuple[Any, str]:
    """Return the filesystem of an address, and the path in it. Raises DataError that names the setting."""
    if protocol(url) in _LOGINS and "@" in urlsplit(url).netloc:
        what = f"{setting}={without_login(url)}: an address with {protocol(url)}:// holds no login"
        raise DataError(what, hint=_LOGINS[protocol(url)])
    with _fsspec(url, setting) as fsspec:
        # the protocol in lower case, as scheme() returns it, because fsspec knows no other
        return fsspec.core.url_to_fs(f"{scheme(url)}://{url.partition('://')[2]}")  # type: ignore[no-any-return]


def refuse_protocol(source: str) -> None:
    """Refuse an address whose protocol can't be read here, without connecting. Raises DataError."""
    if is_local(source) or scheme(source) in WEB:
        return
    with _fsspec(source, "dataset.source") as fsspec:
        for name in scheme(source).split("::"):  # drivers may be chained: simplecache::s3
            fsspec.get_filesystem_class(name)


def reason_of(error: Exception) -> str:
    """Return a driver's error on one line without secrets; each driver has its own error classes."""
    text = hide(str(error), secrets_of_environment(os.environ))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def login_hint(url: str, error: Exception) -> str | None:
    """Return how to log in to a store, if missing or wrong credentials caused the error."""
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
            f"{setting}={without_login(url)}: the driver of {name}:// is not installed ({error})",
            hint=install(_DRIVERS.get(name, f"'fsspec[{name}]'")),
        ) from error
    except ValueError as error:
        protocols = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{setting}={without_login(url)}: {error}; protocols: http, https, {protocols}") from error


class ObjectStore:
    """A folder at ``address``. Every driver error becomes a DataError that names the setting and the address."""

    def __init__(self, address: str, setting: str) -> None:
        """Open the store. Raises DataError: an unknown protocol, or its driver isn't installed."""
        self.named = f"{setting}={without_login(address) if scheme(address) else address}"
        self._url = address if scheme(address) else f"file://{address}"
        self._filesystem, self._root = open_filesystem(self._url, setting)

    def names(self, folder: str) -> list[str]:
        """List the files directly in ``folder``; empty if it doesn't exist. Raises DataError."""
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
        # raised outside of _explained, which would turn it into a DataError
        raise FileNotFoundError(f"{name} isn't there") from missing

    def below(self) -> dict[str, int]:
        """Return path → bytes of all files below the address, at any depth. Raises DataError."""
        with self._explained("listed"):
            entries = self._filesystem.find(self._root, detail=True)
        top = len(self._root.rstrip("/")) + 1
        return {path[top:]: int(about.get("size") or 0) for path, about in sorted(entries.items())}

    def get_below(self, names: Sequence[str], folder: Path) -> None:
        """Download files of ``below`` to the same paths in ``folder``, concurrently if the driver can.

        Raises DataError: a file can't be read; OSError: a file can't be written.
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
