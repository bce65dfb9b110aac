"""A ``dataset.source`` that is a folder of files, local or not: makes it a local folder.

It may be in an object store, or packed in an archive. An archive isn't trusted: links and paths out of it are refused.
"""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from pipeline.core.errors import DataError
from pipeline.data.base import Workspace
from pipeline.data.progress import require_room, room
from pipeline.data.sources.download import DownloadRequest, download
from pipeline.data.sources.source import WEB, ObjectStore, file_name, local_path, refuse_special, scheme, without_login
from trainers.core.config import DatasetConfig

_AT_ONCE = 64  # files per request to a driver
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


class Fetched(NamedTuple):
    """A file or folder that is local now; ``origin`` says in messages where it came from."""

    path: Path
    origin: str


def local(config: DatasetConfig, expected: str) -> Path | None:
    """Return the local folder or file; None for an address. ``expected``: in words, for messages. Raises DataError."""
    if config.source is None:
        raise DataError(f"dataset={config.name} needs your images", hint=f"dataset.source=<{expected}>")
    path = local_path(config.source)
    if path is not None and not path.is_dir():
        refuse_special(config.source, path)
    return path


def one_file(config: DatasetConfig, work: Workspace, expected: str, suffix: str) -> Fetched | None:
    """Return the file if the source is a single one with this suffix, local or remote; else None. Raises DataError."""
    path, source = local(config, expected), config.source or ""
    if path is not None:
        return Fetched(path, str(path)) if path.name.endswith(suffix) and not path.is_dir() else None
    name = file_name(source)
    if not name.endswith(suffix):
        return None
    return Fetched(_download(config, source, name, work), without_login(source))


def get_folder(config: DatasetConfig, work: Workspace, expected: str, suffixes: tuple[str, ...]) -> Fetched:
    """Return a local folder; for an address or archive, fetch the files with these suffixes. Raises DataError."""
    path = local(config, expected)
    if path is not None and path.is_dir():
        return Fetched(path, str(path))
    source = config.source or ""
    origin = str(path) if path is not None else without_login(source)
    name = path.name if path is not None else file_name(source)
    # an address without the name of an archive is a folder in an object store
    is_archive = name.endswith(ARCHIVES)
    if not is_archive and (path is not None or scheme(source) in WEB):
        raise DataError(
            f"dataset.source={origin} is neither a folder nor an archive ({', '.join(ARCHIVES)})"
            + ("" if path is not None else "; a web server has no list of its files"),
            hint=f"dataset.source=<{expected}>",
        )
    folder = work.folder / "unpacked"
    folder.mkdir()
    if not is_archive:
        _fetch_folder(source, suffixes, folder, work)
        return Fetched(folder, origin)
    archive = path or _download(config, source, name, work)
    work.report(f"unpacking {name}", 0, None)
    extract(archive, suffixes, folder)
    return Fetched(folder, origin)


def _fetch_folder(source: str, suffixes: tuple[str, ...], folder: Path, work: Workspace) -> None:
    """Download the files with these suffixes below an address into ``folder``. Raises DataError, OSError."""
    store = ObjectStore(source, "dataset.source")
    sizes_bytes = {
        name: size_bytes
        for name, size_bytes in store.below().items()
        # an object may have any name, and .. would be a path outside of the folder
        if name.lower().endswith(suffixes) and ".." not in name.split("/")
    }
    if not sizes_bytes:
        raise DataError(
            f"{store.named} holds none of {', '.join(suffixes)}", hint="doit fetch with the address of their folder"
        )
    names, total_bytes = list(sizes_bytes), sum(sizes_bytes.values())
    with room(folder, total_bytes):
        for begin in range(0, len(names), _AT_ONCE):
            end = begin + _AT_ONCE
            store.get_below(names[begin:end], folder)
            work.report(f"fetching {store.named}", sum(sizes_bytes[name] for name in names[:end]), total_bytes)


def _download(config: DatasetConfig, source: str, name: str, work: Workspace) -> Path:
    return download(config, DownloadRequest(name=name, urls=(source,), sha256=None), work.folder, work.report)


# --------------------------------------------------------------------------------- archives
def extract(archive: Path, suffixes: tuple[str, ...], folder: Path) -> None:
    """Extract the members whose names end in one of ``suffixes``. Raises DataError: damaged, hostile or too large."""
    # by hand, because early releases of Python 3.11 lack tarfile's filters
    with room(folder, 0), _damage_as_data_error(archive):
        for inner, size_bytes, content in _members(archive):
            path = folder / inner
            if content is None or not path.name.lower().endswith(suffixes):
                continue
            if path.exists():  # which of the two is read could depend on the program that unpacks
                raise _hostile(archive, str(inner), "is there twice")
            require_room(folder, size_bytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("xb") as file:
                shutil.copyfileobj(content, file)


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes] | None]]:
    """Yield path, size in bytes and content (None: a folder) of each member. Read it before you ask for the next."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for member in bundle.infolist():
                path = _inner_path(archive, member.filename)
                # the upper 16 bits are the Unix mode; 0: an archive from a system without modes
                if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _hostile(archive, member.filename, "is a link or a device")
                yield path, member.file_size, None if member.is_dir() else bundle.open(member)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, "r|*") as tar:  # in one pass
            for item in tar:
                path = _inner_path(archive, item.name)
                if not (item.isreg() or item.isdir()):
                    raise _hostile(archive, item.name, "is a link or a device")
                yield path, item.size, tar.extractfile(item)
    else:
        raise DataError(f"{archive} is neither a tar nor a zip archive, or it is cut off")


@contextmanager
def _damage_as_data_error(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DataError(f"{archive} is damaged or cut off: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{archive} is damaged: {error}") from error  # gzip and bz2 raise OSError without an errno


def _inner_path(archive: Path, member: str) -> PurePosixPath:
    """Return the member's path. Raises DataError if it would leave the archive's folder on any operating system."""
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
        raise _hostile(archive, member, "lies outside the archive's folder")
    return path


def _hostile(archive: Path, member: str, fault: str) -> DataError:
    return DataError(f"{archive} is refused: its member {member!r} {fault}; nothing of it was used")
