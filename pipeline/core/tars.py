"""Extract files and folders from an untrusted tar stream, which a host has sent or a run's archive contains.

tarfile trusts the headers. Here sizes and numbers are limited, and links, devices, absolute names, ``..`` and repeated
names are refused.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

BLOCK_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20  # at most, of one member, including records for long names
_MOST_MEMBERS = 100_000
_LATEST = float(1 << 33)  # unix seconds (in 2242): a later time in a header becomes this one

DAMAGE = (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError, RecursionError)
"""Exceptions that reading members may raise, in addition to OSError."""


class UnfitError(ValueError):
    """A member that no Paceline sender writes; ``str`` names it and the reason."""


class Readable(Protocol):
    """A source of tar bytes; ``read`` may return less than requested, and returns b"" only at the end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file or folder."""

    name: str  # relative, without ``..``
    size: int
    mtime: float
    is_folder: bool
    content: Readable  # valid until the next member is requested

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes. Raises UnfitError: fewer than the header says."""
        left = self.size
        while left:
            data = self.content.read(min(left, BLOCK_BYTES))
            if not data:
                raise UnfitError(f"{self.name!r} is cut off")
            left -= len(data)
            yield data

    def write(self, folder: Path) -> None:
        """Create the file below ``folder``, which nobody else writes to, without execute permission. Raises OSError."""
        path = folder / self.name
        if self.is_folder:
            path.mkdir(parents=True, exist_ok=True)
            return
        if self.size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            for data in self.blocks():
                file.write(data)
        os.utime(path, (self.mtime, self.mtime))  # decides which of a script's checkpoints is the newest


def members(stream: Readable, *, most_bytes: int) -> Iterator[Member]:
    """Yield the files and folders of an uncompressed tar of at most ``most_bytes``, in order.

    Raises UnfitError: a member isn't plain, or a limit is exceeded; OSError or ``DAMAGE``: it is no valid tar.
    """
    source = _Bounded(stream, most_bytes)
    names = set[str]()
    with tarfile.open(fileobj=cast(Any, source), mode="r:") as tar:
        while (member := tar.next()) is not None:
            if member.size < 0 or member.size > most_bytes:
                raise UnfitError(f"{member.name[:200]!r} has {member.size:,} bytes, of at most {most_bytes:,}")
            _refuse_unplain(member)
            if member.name in names:
                raise UnfitError(f"{member.name[:200]!r} is in it twice")
            names.add(member.name)
            if len(names) > _MOST_MEMBERS:
                raise UnfitError(f"it holds more than {_MOST_MEMBERS:,} files")
            # while the caller reads this member, its content and padding may be read too
            source.allowed = member.size + _HEADER_BYTES
            yield Member(
                name=member.name,
                size=0 if member.isdir() else member.size,
                mtime=min(max(float(member.mtime), 0.0), _LATEST) if math.isfinite(member.mtime) else 0.0,
                is_folder=member.isdir(),
                content=source,
            )
            source.allowed = _HEADER_BYTES
    # A complete tar ends with a block of zeros. tarfile takes a broken header for the end too.
    if source.last != bytes(tarfile.BLOCKSIZE):
        raise UnfitError("it is cut off")


def _refuse_unplain(member: tarfile.TarInfo) -> None:
    name, path = member.name, PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise UnfitError(f"{name[:200]!r} is no plain file")
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise UnfitError(f"{name[:200]!r} leads out of its folder")
    if str(path) != name or len(os.fsencode(name)) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise UnfitError(f"{name[:200]!r} is no name of a file")


class _Bounded:
    """The input file that tarfile reads; it can only be read forwards."""

    def __init__(self, stream: Readable, most_bytes: int) -> None:
        self._stream, self._left, self._at = stream, most_bytes, 0
        self.allowed = _HEADER_BYTES  # before the next member; a forged header would make tarfile read gigabytes
        self.last = b""  # the bytes that were read last

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.allowed:
            raise UnfitError(f"a header of it has {size:,} bytes, of at most {_HEADER_BYTES:,}")
        self.allowed -= size
        self.last = self._take(size)
        return self.last

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        """Read on to this position and drop what is read: tarfile skips the rest of a member so."""
        while self._at < at and self._take(min(at - self._at, BLOCK_BYTES)):
            pass
        if self._at != at:
            raise UnfitError("it is cut off")

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the stream belongs to its opener."""

    def _take(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the stream. Raises UnfitError: above the limit."""
        parts, left = list[bytes](), size
        while left and (data := self._stream.read(left)):
            parts.append(data)
            left -= len(data)
        self._at += size - left
        self._left -= size - left
        if self._left < 0:
            raise UnfitError("it unpacks to more than is allowed")
        return b"".join(parts)
