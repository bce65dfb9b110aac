"""Extract files from untrusted tar and zip archives."""

from __future__ import annotations

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from pipeline.core.errors import DataError
from pipeline.data import disk

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_MAX_MEMBERS = 10_000
_MAX_BYTES = 2 << 30  # unpacked size of all members; the official sets have less than a tenth
_COPY_BYTES = 1 << 20
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


def extract(archive: Path, wanted: Mapping[str, int], folder: Path) -> None:
    """Extract the members whose file names are in ``wanted`` (name → maximal bytes) flat into ``folder``.

    Each file is written under its known name, so no member can choose its path, and tarfile's filters, which early 3.11
    releases lack, aren't needed. An archive with a hostile member (absolute or ``..`` path, link, device, too large) is
    refused as a whole.

    Raises:
        DataError: not a tar or zip archive, damaged, hostile or too large.
    """
    with disk.room(folder, sum(wanted.values())), _damage_as_data_error(archive):
        total_bytes = 0
        for number, (path, size_bytes, content) in enumerate(_members(archive), start=1):
            total_bytes += size_bytes
            if number > _MAX_MEMBERS:
                raise _hostile(archive, str(path), f"is one of more than {_MAX_MEMBERS} members")
            if total_bytes > _MAX_BYTES:
                too_much = f"brings the unpacked size to {total_bytes} bytes (limit {_MAX_BYTES})"
                raise _hostile(archive, str(path), too_much)
            if content is not None and path.name in wanted:
                _copy(archive, content, folder / path.name, wanted[path.name])


def extract_tree(archive: Path, suffixes: tuple[str, ...], folder: Path) -> None:
    """Extract the members whose names end in one of ``suffixes``, at their own paths below ``folder``.

    An archive with a link, a device or a path outside of ``folder`` is refused as a whole. Each file needs enough free
    disk space.

    Raises:
        DataError: not a tar or zip archive, damaged, hostile or too large.
    """
    with disk.room(folder, 0), _damage_as_data_error(archive):
        for inner, size_bytes, content in _members(archive):
            path = folder / inner
            if content is not None and path.name.lower().endswith(suffixes):
                disk.require(folder, size_bytes)
                path.parent.mkdir(parents=True, exist_ok=True)
                _copy(archive, content, path, size_bytes)


Content = Callable[[], IO[bytes]]


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, int, Content | None]]:
    """Yield path, size in bytes and content of each member; None: a folder.

    The content must be read before the next item, as the archive is read in one pass.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for member in bundle.infolist():
                path = _inner_path(archive, member.filename)
                if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _hostile(archive, member.filename, "is a link or a device")
                yield path, member.file_size, None if member.is_dir() else partial(bundle.open, member)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, "r|*") as tar:
            for item in tar:
                path = _inner_path(archive, item.name)
                if not (item.isreg() or item.isdir()):
                    raise _hostile(archive, item.name, "is a link or a device")
                yield path, item.size, partial(_content, tar, item) if item.isreg() else None
    else:
        raise DataError(f"{archive} is neither a tar nor a zip archive, or it is cut off")


def _content(tar: tarfile.TarFile, item: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(item)
    assert content is not None  # a regular file
    return content


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


def _copy(archive: Path, content: Content, path: Path, max_bytes: int) -> None:
    """Copy while counting the actual bytes, because an archive's declared sizes can't be trusted."""
    if path.exists():
        raise _hostile(archive, path.name, "is there twice")
    written = 0
    with content() as source, path.open("xb") as file:
        while block := source.read(_COPY_BYTES):
            written += len(block)
            if written > max_bytes:
                raise _hostile(archive, path.name, f"has more than the official {max_bytes} bytes")
            file.write(block)


def _hostile(archive: Path, member: str, why: str) -> DataError:
    return DataError(f"{archive} is refused: its member {member!r} {why}; nothing of it was used")
