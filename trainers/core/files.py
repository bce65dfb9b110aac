"""Atomic writes of result files: a file appears complete or not at all. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trainers.contract import variables
from trainers.contract.seal import sealed_text
from trainers.core.errors import TrainerError


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashingFile:
    """A binary file for writing that hashes all bytes written (sha256) and keeps the first write error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._digest.update(data)
        self.size_bytes += len(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def replace(path: Path, write: Callable[[HashingFile], object]) -> str:
    """Let ``write`` fill a temporary file in the folder of ``path``, fsync it and rename it. Returns the sha256.

    The folder must exist: a removed run folder must not be recreated. Raises OSError; no temporary file remains.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as raw:
            file = HashingFile(raw)
            write(file)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file.sha256


def write_atomic(path: Path, write: Callable[[HashingFile], object], *, needed_bytes: int = 0) -> str:
    """Call ``replace``; a failure is a TrainerError that names the file, the bytes needed and the bytes free."""
    with explained(path, needed_bytes):
        return replace(path, write)


def make_folder(path: Path) -> None:
    """Make a folder, but not its parent, the run folder: if it was removed, it stays removed. Raises TrainerError."""
    with explained(path, 0):
        path.mkdir(exist_ok=True)


def write_json(path: Path, value: Any) -> str:
    """Write a value as one line of JSON with ``write_atomic``; return the sha256. Raises ValueError: it has a NaN."""
    return write_bytes(path, (json.dumps(value, allow_nan=False) + "\n").encode())


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON that holds its own sha256 (``trainers.contract.seal``) with ``write_atomic``."""
    write_bytes(path, sealed_text(value).encode())


def write_bytes(path: Path, data: bytes) -> str:
    """Write bytes from memory with ``write_atomic``."""
    return write_atomic(path, lambda file: file.write(data), needed_bytes=len(data))


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files of killed ``write_atomic`` calls from a folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextmanager
def explained(path: Path, needed_bytes: int) -> Iterator[None]:
    """Convert an OSError into a TrainerError that names the file, the bytes needed and the bytes free."""
    try:
        yield
    except OSError as error:
        raise could_not_write(path, error, needed_bytes) from error


def could_not_write(path: Path, error: BaseException, needed_bytes: int) -> TrainerError:
    """Return the error for a file that could not be written, and delete the reserve file to make room for messages."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if not path.parent.is_dir():
        return TrainerError(f"{path} could not be written: its folder was removed while the run was going on")
    room = _room(path)
    if reserve := os.environ.get(variables.RESERVE):
        Path(reserve).unlink(missing_ok=True)
    return TrainerError(
        f"{path} could not be written ({why}): needs {needed_bytes} bytes, {room}; "
        "make room, or set paths.runs (on other hosts cluster.workdir) to another disk"
    )


def _room(path: Path) -> str:
    """Say what the disk of ``path`` has left."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    disk, free = os.statvfs(folder), f"{shutil.disk_usage(folder).free} bytes are free there"
    if disk.f_files > 0 and disk.f_favail == 0:
        return f"no inodes are left there for new files (df -i), though {free}"
    return free
