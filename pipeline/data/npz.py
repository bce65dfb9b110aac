"""Arrays inside a .npz, looked at by their headers and read in blocks. Nothing is ever unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipeline.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.data.base import Images

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError)


@dataclass(frozen=True)
class Header:
    """What a .npy says before its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


class ArrayFile:
    """A .npz file. Raises DataError where it is no zip archive or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not zipfile.is_zipfile(path):
            raise DataError(
                f"{path} is not a .npz file, or it is cut off", try_="numpy.savez(path, images=…, labels=…)"
            )
        with self._reading("the directory"), zipfile.ZipFile(path) as bundle:
            members = bundle.namelist()
        self.names = tuple(name.removesuffix(".npy") for name in members if name.endswith(".npy"))

    def header(self, name: str) -> Header:
        """Shape and dtype; an array of Python objects is refused here."""
        with self._member(name) as file:
            return self._header(name, file)

    def load(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The whole array."""
        import numpy as np

        self.header(name)
        with self._reading(name), np.load(self.path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])

    def blocks(self, name: str, size: int) -> Iterator[Images]:
        """A uint8 array in pieces of ``size`` along its first axis."""
        import numpy as np

        with self._member(name) as file:
            header = self._header(name, file)
            if header.fortran_order:  # the first axis runs fastest: it can't be read in pieces
                whole = self.load(name)
                yield from (whole[begin : begin + size] for begin in range(0, len(whole), size))
                return
            item_bytes = int(np.prod(header.shape[1:]))
            for begin in range(0, header.shape[0], size):
                count = min(size, header.shape[0] - begin)
                content = file.read(count * item_bytes)
                if len(content) != count * item_bytes:
                    raise DataError(f"{self.path}: {name} is cut off after {begin} of {header.shape[0]} images")
                yield np.frombuffer(content, dtype=np.uint8).reshape(count, *header.shape[1:])

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        if name not in self.names:
            raise DataError(f"{self.path} has no array {name}; it has: {', '.join(self.names)}")
        with self._reading(name), zipfile.ZipFile(self.path) as bundle, bundle.open(f"{name}.npy") as file:
            yield file

    def _header(self, name: str, file: IO[bytes]) -> Header:
        from numpy.lib import format as npy

        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
        if dtype.hasobject:
            raise DataError(f"{self.path}: {name} holds Python objects ({dtype}); wanted: an array of numbers")
        return Header(shape, dtype, fortran_order)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {name} is damaged: {error}") from error
