"""Read the batch files of CIFAR-10, in both published layouts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.data.base import images_per_block

if TYPE_CHECKING:
    from pipeline.data.base import Block

_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3072
_RECORD_BYTES = 1 + _IMAGE_BYTES


def read_binary(path: Path) -> Iterator[Block]:
    """Read a .bin batch: records of one label byte and 3072 pixels, red plane first.

    Raises:
        DataError: the file is not a whole number of records.
    """
    with path.open("rb") as file:
        while chunk := file.read(_RECORD_BYTES * images_per_block(_SHAPE)):
            if len(chunk) % _RECORD_BYTES:
                raise DataError(f"{path} ends within a record of {_RECORD_BYTES} bytes")
            records = np.frombuffer(chunk, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
            yield records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].astype(np.int64)


def read_python(path: Path) -> Iterator[Block]:
    """Read a pickled batch {"data": uint8 [n, 3072], "labels": list of n}, after its checksum was verified.

    In addition, the unpickler only reconstructs numpy arrays.

    Raises:
        DataError: the pickle contains anything else, or arrays of another shape.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        images, labels = batch["data"], np.asarray(batch["labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a CIFAR-10 batch: {error}") from error
    wanted = (len(labels), _IMAGE_BYTES)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != wanted:
        raise DataError(f"{path}: data is not a uint8 array of shape {wanted}")
    yield images.reshape(-1, *_SHAPE), labels.astype(np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Allows only the classes that numpy arrays of numbers are rebuilt from, under their old and new module names."""

    _ALLOWED = (
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of an array")
        return super().find_class(module, name)
