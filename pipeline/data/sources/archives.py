"""Extract files from untrusted tar and zip archives."""

from __future__ import annotations

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        if zipfile.is_zipfile(archive):
            _extract_zip(archive, wanted, folder)
        elif tarfile.is_tarfile(archive):
            _extract_tar(archive, wanted, folder)
        else:
            raise DataError(f"{archive} is neither a tar nor a zip archive, or it is cut off")


def extract_tree(archive: Path, suffixes: tuple[str, ...], folder: Path) -> None:
    """Extract the members whose names end in one of ``suffixes``, at their own paths below ``folder``.

    An archive with a link, a device or a path outside of ``folder`` is refused as a whole. Each file needs enough free
    disk space.

    Raises:
        DataError: not a tar or zip archive, damaged, hostile or too large.
    """
    with disk.room(folder, 0), _damage_as_data_error(archive):
        for name, content, size_bytes in _members(archive):
            path = folder / _inner_path(archive, name)
            if path.name.lower().endswith(suffixes):
                disk.require(folder, size_bytes)
                path.parent.mkdir(parents=True, exist_ok=True)
                _copy(archive, content, path, size_bytes)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes], int]]:
    """Yield (name, content, size in bytes) of each file. The content must be read before the next item."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for member in bundle.infolist():
                _refuse_special_zip(archive, member)
                if not member.is_dir():
                    with bundle.open(member) as content:
                        yield member.filename, content, member.file_size
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, "r|*") as tar:
            for item in tar:
                if not (item.isreg() or item.isdir()):
                    raise _hostile(archive, item.name, "is a link or a device")
                member_file = tar.extractfile(item)
                if member_file is not None:
                    yield item.name, member_file, item.size
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


def _extract_tar(archive: Path, wanted: Mapping[str, int], folder: Path) -> None:
    """Extract in one streaming pass, so that the archive is decompressed once."""
    with tarfile.open(archive, "r|*") as tar:
        budget = _Budget(archive)
        for member in tar:
            budget.spend(member.name, member.size)
            name = _inner_name(archive, member.name)
            if not (member.isreg() or member.isdir()):
                raise _hostile(archive, member.name, "is a link or a device")
            if member.isreg() and name in wanted:
                content = tar.extractfile(member)
                assert content is not None  # member.isreg()
                _copy(archive, content, folder / name, wanted[name])


def _extract_zip(archive: Path, wanted: Mapping[str, int], folder: Path) -> None:
    with zipfile.ZipFile(archive) as bundle:
        budget = _Budget(archive)
        for member in bundle.infolist():
            budget.spend(member.filename, member.file_size)
            name = _inner_name(archive, member.filename)
            _refuse_special_zip(archive, member)
            if not member.is_dir() and name in wanted:
                with bundle.open(member) as content:
                    _copy(archive, content, folder / name, wanted[name])


def _refuse_special_zip(archive: Path, member: zipfile.ZipInfo) -> None:
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _hostile(archive, member.filename, "is a link or a device")


def _inner_name(archive: Path, member: str) -> str:
    """Return the member's file name."""
    return _inner_path(archive, member).name


def _inner_path(archive: Path, member: str) -> PurePosixPath:
    """Return the member's path; one that leaves the archive's folder on any system is hostile."""
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
        raise _hostile(archive, member, "lies outside the archive's folder")
    return path


class _Budget:
    """Limits the number of members and their declared bytes."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.members = self.total_bytes = 0

    def spend(self, name: str, size_bytes: int) -> None:
        self.members += 1
        self.total_bytes += size_bytes
        if self.members > _MAX_MEMBERS:
            raise _hostile(self.archive, name, f"is one of more than {_MAX_MEMBERS} members")
        if self.total_bytes > _MAX_BYTES:
            too_much = f"brings the unpacked size to {self.total_bytes} bytes (limit {_MAX_BYTES})"
            raise _hostile(self.archive, name, too_much)


def _copy(archive: Path, content: IO[bytes], path: Path, max_bytes: int) -> None:
    """Copy while counting the actual bytes, because an archive's declared sizes can't be trusted."""
    if path.exists():
        raise _hostile(archive, path.name, "is there twice")
    written = 0
    with path.open("xb") as file:
        while block := content.read(_COPY_BYTES):
            written += len(block)
            if written > max_bytes:
                raise _hostile(archive, path.name, f"has more than the official {max_bytes} bytes")
            file.write(block)


def _hostile(archive: Path, member: str, why: str) -> DataError:
    return DataError(f"{archive} is refused: its member {member!r} {why}; nothing of it was used")
