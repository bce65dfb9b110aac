"""Extract files from untrusted tar and zip archives."""

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
from typing import IO

from pipeline.core.errors import DataError
from pipeline.data import disk

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


def extract(archive: Path, suffixes: tuple[str, ...], folder: Path) -> None:
    """Extract the members whose names end in one of ``suffixes``, at their own paths below ``folder``.

    An archive with a link, a device or a path outside of ``folder`` is refused as a whole. Each file needs enough free
    disk space. tarfile's filters aren't used, because early releases of Python 3.11 lack them.

    Raises:
        DataError: not a tar or zip archive, damaged, hostile or too large.
    """
    with disk.room(folder, 0), _damage_as_data_error(archive):
        for inner, size_bytes, content in _members(archive):
            path = folder / inner
            if content is None or not path.name.lower().endswith(suffixes):
                continue
            if path.exists():
                raise _hostile(archive, str(inner), "is there twice")
            disk.require(folder, size_bytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("xb") as file:
                shutil.copyfileobj(content, file)


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes] | None]]:
    """Yield path, size in bytes and content of each member; None: a folder.

    The content must be read before the next item, as the archive is read in one pass.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for member in bundle.infolist():
                path = _inner_path(archive, member.filename)
                if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _hostile(archive, member.filename, "is a link or a device")
                yield path, member.file_size, None if member.is_dir() else bundle.open(member)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, "r|*") as tar:
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
    """Return the member's path; one that leaves the archive's folder on any system is hostile."""
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
        raise _hostile(archive, member, "lies outside the archive's folder")
    return path


def _hostile(archive: Path, member: str, why: str) -> DataError:
    return DataError(f"{archive} is refused: its member {member!r} {why}; nothing of it was used")
