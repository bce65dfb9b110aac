"""Addresses that fsspec knows (s3://, gs://, sftp://, …): their drivers, logins, and errors in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pipeline.core.errors import DataError
from pipeline.core.redact import hide, of_environment
from pipeline.data.source import WEB, is_local, scheme, shown
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
    import fsspec

    if protocol(url) in _LOGINS and "@" in urlsplit(url).netloc:
        raise DataError(
            f"{setting}={shown(url)}: an address with {protocol(url)}:// holds no login", hint=_LOGINS[protocol(url)]
        )
    with _explained(url, setting):
        return fsspec.core.url_to_fs(f"{scheme(url)}://{url.partition('://')[2]}")  # type: ignore[no-any-return]


def refuse_protocol(source: str) -> None:
    """Raises DataError where an address can't be read here, whatever answers there."""
    if is_local(source) or scheme(source) in WEB:
        return
    import fsspec

    with _explained(source, "dataset.source"):
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
def _explained(url: str, setting: str) -> Iterator[None]:
    """What fsspec says of a protocol, with the fix. Raises DataError."""
    import fsspec

    try:
        yield
    except ImportError as error:
        name = protocol(url)
        raise DataError(
            f"{setting}={shown(url)}: the driver of {name}:// is not installed ({error})",
            hint=install(_DRIVERS.get(name, f"'fsspec[{name}]'")),
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{setting}={shown(url)}: {error}; protocols: http, https, {known}") from error
