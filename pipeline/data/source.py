"""Reading ``dataset.source``: which of the forms it has, and how it is shown in messages."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit


def local_path(source: str | None) -> Path | None:
    """The absolute path of a plain path or file:// URL; None for other URLs and for no source."""
    if source is None:
        return None
    if source.startswith("file://"):
        return Path(unquote(urlsplit(source).path))
    return None if "://" in source else Path(os.path.normpath(Path(source).expanduser().absolute()))


def shown(url: str) -> str:
    """The address without user, password, query and fragment: they may hold secrets (signed URLs)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def file_name(url: str) -> str:
    """The last part of a URL's path; empty for a folder that ends in a slash."""
    return unquote(urlsplit(url).path).rpartition("/")[2]
