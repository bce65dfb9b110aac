"""Parse ``dataset.source``: the form of the source, its local path, and its text in messages."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from pipeline.core.errors import DataError
from pipeline.core.files import expanded

WEB = ("http", "https")
_LOCAL = ("file", "local")  # fsspec accepts both names
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def scheme(source: str) -> str:
    """Return the lower-case text before ``://``; empty for a path."""
    return source.partition("://")[0].lower() if "://" in source else ""


def is_local(source: str) -> bool:
    """Return True for a path or a file:// URL."""
    return scheme(source) in ("", *_LOCAL)


def local_path(source: str | None) -> Path | None:
    """Return the absolute path of a plain path or file:// URL; None for other URLs and for no source.

    Raises:
        DataError: a file:// URL names a host.
    """
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

    Args:
        parents: real paths of the parent folders up to the start of the walk.
    """
    place = os.path.realpath(folder)
    if place in parents:  # a link to a parent folder
        return
    with suppress(PermissionError):  # unreadable for every process of this user
        for path in folder.iterdir():
            if path.is_dir():
                yield from walked(path, (*parents, place))
            else:
                yield path


def shown(url: str) -> str:
    """Return the address without user, password, query and fragment, which may hold secrets (signed URLs)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def file_name(url: str) -> str:
    """Return the last part of a URL's path; empty for a folder that ends in a slash."""
    return unquote(urlsplit(url).path).rpartition("/")[2]
