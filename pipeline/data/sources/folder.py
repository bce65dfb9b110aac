"""Get a ``dataset.source`` that is a folder of files: local, at an address, or packed in an archive."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import DataError
from pipeline.data import disk
from pipeline.data.base import Workspace
from pipeline.data.sources import archives
from pipeline.data.sources.download import Wanted, download
from pipeline.data.sources.filesystems import ObjectStore
from pipeline.data.sources.source import WEB, file_name, local_path, refuse_special, scheme, shown
from trainers.core.config import DatasetConfig

_AT_ONCE = 64  # files per request to a driver


class Place(NamedTuple):
    """A local folder; ``origin`` is its source for messages."""

    folder: Path
    origin: str


def local(config: DatasetConfig, what: str) -> Path | None:
    """Return the local folder or file; None for an address. ``what`` describes the expected source in messages.

    Raises:
        DataError: no source is given, or it doesn't exist.
    """
    if config.source is None:
        raise DataError(f"dataset={config.name} needs your images", hint=f"dataset.source=<{what}>")
    path = local_path(config.source)
    if path is not None and not path.is_dir():
        refuse_special(config.source, path)
    return path


def one_file(config: DatasetConfig, work: Workspace, what: str, suffix: str) -> tuple[Path, str] | None:
    """Return the file and its origin if the source is a single file with this suffix, local or remote; else None.

    Raises:
        DataError: no source is given, or it can't be fetched.
    """
    path, source = local(config, what), config.source or ""
    name = path.name if path is not None else file_name(source)
    if not name.endswith(suffix) or (path is not None and path.is_dir()):
        return None
    return (path, str(path)) if path is not None else (_download(config, source, name, work), shown(source))


def get_folder(config: DatasetConfig, work: Workspace, what: str, suffixes: tuple[str, ...]) -> Place:
    """Return a local folder; for an address or archive, fetch the files with these suffixes. Raises DataError."""
    path = local(config, what)
    if path is not None and path.is_dir():
        return Place(path, str(path))
    source = config.source or ""
    origin = str(path) if path is not None else shown(source)
    name = path.name if path is not None else file_name(source)
    is_archive = name.endswith(archives.SUFFIXES)
    if not is_archive and (path is not None or scheme(source) in WEB):
        raise DataError(
            f"dataset.source={origin} is neither a folder nor an archive ({', '.join(archives.SUFFIXES)})"
            + ("" if path is not None else "; a web server has no list of its files"),
            hint=f"dataset.source=<{what}>",
        )
    folder = work.folder / "unpacked"
    folder.mkdir()
    if not is_archive:
        _fetch_folder(source, suffixes, folder, work)
        return Place(folder, origin)
    archive = path or _download(config, source, name, work)
    work.report(f"unpacking {name}", 0, None)
    archives.extract(archive, suffixes, folder)
    return Place(folder, origin)


def _fetch_folder(source: str, suffixes: tuple[str, ...], folder: Path, work: Workspace) -> None:
    """Download the files with these suffixes from an fsspec folder (s3://, gs://, …). Raises DataError, OSError."""
    store = ObjectStore(source, "dataset.source")
    sizes = {
        name: size
        for name, size in store.below().items()
        if name.lower().endswith(suffixes) and ".." not in name.split("/")
    }
    if not sizes:
        raise DataError(
            f"{store.named} holds none of {', '.join(suffixes)}", hint="doit fetch with the address of their folder"
        )
    names, total = list(sizes), sum(sizes.values())
    with disk.room(folder, total):
        for begin in range(0, len(names), _AT_ONCE):
            some = names[begin : begin + _AT_ONCE]
            store.get_below(some, folder)
            work.report(f"fetching {store.named}", sum(sizes[name] for name in names[: begin + len(some)]), total)


def _download(config: DatasetConfig, source: str, name: str, work: Workspace) -> Path:
    return download(config, Wanted(name=name, urls=(source,), sha256=None), work.folder, work.report)
