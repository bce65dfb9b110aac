"""The reader of array data sets: headers, and content in blocks, of a .npz file or of a function's arrays in memory.

A .npz file may be larger than memory, and may come from anybody, so nothing in it is ever unpickled.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from pipeline.core.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.base import Images

_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, EOFError, ValueError, SyntaxError, TypeError,
    KeyError, OverflowError, RecursionError,
    RuntimeError,  # zipfile: an encrypted member, or one in an unknown method
)  # fmt: skip


@dataclass(frozen=True)
class ArrayHeader:
    """The header of a .npy array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


class ArrayFile:
    """A .npz file. Raises DataError if it is no zip archive or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not zipfile.is_zipfile(path):
            raise DataError(
                f"{path} is not a .npz file, or it is cut off", hint="numpy.savez(path, images=…, labels=…)"
            )
        with self._reading("the directory"), zipfile.ZipFile(path) as bundle:
            members = [member for member in bundle.infolist() if member.filename.endswith(".npy")]
        self.names = tuple(member.filename.removesuffix(".npy") for member in members)

    def header(self, name: str) -> ArrayHeader:
        """Return shape and dtype. Refuses arrays of Python objects and truncated arrays."""
        with self._member(name) as file:
            return self._header(name, file)

    def load(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the whole array."""
        self.header(name)  # refuses what can't be loaded
        with self._reading(name), np.load(self.path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])

    def blocks(self, name: str, size: int) -> Iterator[Images]:
        """Yield a uint8 array in pieces of ``size`` along its first axis."""
        with self._member(name) as file:
            header = self._header(name, file)
            if header.fortran_order:  # the first axis varies fastest, so the file can't be read in pieces
                whole = self.load(name)
                yield from (whole[begin : begin + size] for begin in range(0, len(whole), size))
                return
            item_bytes = math.prod(header.shape[1:])
            for begin in range(0, header.shape[0], size):
                count = min(size, header.shape[0] - begin)
                content = file.read(count * item_bytes)
                yield np.frombuffer(content, dtype=np.uint8).reshape(count, *header.shape[1:])

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        if name not in self.names:
            raise DataError(f"{self.path} has no array {name}; it has: {', '.join(self.names)}")
        with self._reading(name), zipfile.ZipFile(self.path) as bundle, bundle.open(f"{name}.npy") as file:
            yield file

    def _size_bytes(self, name: str) -> int:
        with zipfile.ZipFile(self.path) as bundle:
            return bundle.getinfo(f"{name}.npy").file_size

    def _header(self, name: str, file: IO[bytes]) -> ArrayHeader:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran_order, dtype = read_header(file)
        if dtype.hasobject:
            raise DataError(f"{self.path}: {name} holds Python objects ({dtype}); wanted: an array of numbers")
        wanted_bytes, seen_bytes = math.prod(shape) * dtype.itemsize, self._size_bytes(name) - file.tell()
        # two negative sides would have a positive product
        if min(shape, default=0) < 0 or wanted_bytes != seen_bytes:
            mismatch = f"its header says {dtype} {list(shape)}, which is {wanted_bytes} bytes, and {seen_bytes} follow"
            raise DataError(f"{self.path}: {name} is damaged: {mismatch}")
        return ArrayHeader(shape, dtype, fortran_order)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn what numpy and zipfile raise for a damaged file into a DataError that names the array."""
        try:
            yield
        except _DAMAGE as error:
            raise DataError(f"{self.path}: {name} is damaged: {error or type(error).__name__}") from error


class InMemory:
    """The arrays of a mapping, with the interface of ArrayFile."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path = path  # in messages: the function that returned them
        # the function's "classes" are a list of names and no array; ``datasets.own`` reads them from what it returned
        self._values = {name: np.asanyarray(value) for name, value in values.items() if name != "classes"}
        self.names = tuple(self._values)

    def header(self, name: str) -> ArrayHeader:
        value = self._values[name]
        return ArrayHeader(value.shape, value.dtype, False)

    def load(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        value: np.ndarray[Any, np.dtype[Any]] = self._values[name]
        return value

    def blocks(self, name: str, size: int) -> Iterator[Images]:
        value = self._values[name]
        return (value[begin : begin + size] for begin in range(0, len(value), size))
