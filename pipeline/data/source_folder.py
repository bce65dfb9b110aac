"""``dataset.source`` where it is a folder of files: one that is here, an archive of one, or an archive's address."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import DataError
from pipeline.data import archives
from pipeline.data.base import Workspace
from pipeline.data.download import Wanted, retrieve
from pipeline.data.official import unreachable
from pipeline.data.source import file_name, local_path, refuse_special, shown
from trainers.core.config import DatasetConfig


class Place(NamedTuple):
    """``origin`` is where the folder came from, fit for a message."""

    folder: Path
    origin: str


def local(config: DatasetConfig, what: str) -> Path | None:
    """The folder or file on this computer; None: an address. ``what`` says in a message what is wanted.

    Raises:
        DataError: no source, or none that is there.
    """
    if config.source is None:
        raise DataError(f"dataset={config.name} needs your images", hint=f"dataset.source=<{what}>")
    path = local_path(config.source)
    if path is not None and not path.is_dir():
        refuse_special(config.source, path)
    return path


def get(config: DatasetConfig, work: Workspace, what: str, suffixes: tuple[str, ...]) -> Place:
    """The folder itself; of an archive, its files with these suffixes, unpacked. Raises DataError."""
    path = local(config, what)
    if path is not None and path.is_dir():
        return Place(path, str(path))
    source = config.source or ""
    origin = str(path) if path is not None else shown(source)
    name = path.name if path is not None else file_name(source)
    if not name.endswith(archives.SUFFIXES):
        raise DataError(
            f"dataset.source={origin} is neither a folder nor an archive ({', '.join(archives.SUFFIXES)})",
            hint=f"dataset.source=<{what}>",
        )
    folder = work.folder / "unpacked"
    folder.mkdir()
    archive = path or _download(config, source, name, work)
    work.report(f"unpacking {name}", 0, None)
    archives.extract_tree(archive, suffixes, folder)
    return Place(folder, origin)


def _download(config: DatasetConfig, source: str, name: str, work: Workspace) -> Path:
    got = retrieve(Wanted(name=name, urls=(source,), sha256=None), work.folder, work.report)
    if not isinstance(got, Path):
        raise unreachable(config, name, got)
    return got
