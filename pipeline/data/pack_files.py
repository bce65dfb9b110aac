"""The files of a pack while they are written: pixels in two flat files, or encoded images as they came."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from pipeline.core.files import write_json
from pipeline.data.manifest import IMAGES, LABELS, NAMES, PLACES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.data.base import EncodedImage, Images, Labels


class PackFiles(Protocol):
    """Where images are put. ``names`` are those of the files, ``written_bytes`` grows."""

    names: tuple[str, ...]
    written_bytes: int

    def put(self, at: int, images: Images, labels: Labels, files: Sequence[EncodedImage]) -> None:
        """The images with the numbers from ``at`` on."""
        ...

    def finish(self) -> None:
        """Make the bytes durable."""
        ...


class PixelFiles:
    """uint8 [N, C, H, W] and int64 [N]."""

    names: tuple[str, ...] = (IMAGES, LABELS)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._images, self._labels = (stack.enter_context((folder / name).open("wb")) for name in self.names)
        self.written_bytes = 0

    def put(self, at: int, images: Images, labels: Labels, files: Sequence[EncodedImage]) -> None:
        import numpy as np

        pixels = np.ascontiguousarray(images)
        _write(self._images, at * pixels[0].nbytes, pixels)
        _write(self._labels, 8 * at, labels.astype("<i8"))
        self.written_bytes += pixels.nbytes + 8 * len(labels)

    def finish(self) -> None:
        _flush(self._images, self._labels)


class EncodedFiles:
    """The files one after the other, as they came; where each of the images in the pack's order begins and ends (int64
    [N, 2]); what it is called; its label. So images can be put in any order, in one pass."""

    names: tuple[str, ...] = (IMAGES, PLACES, NAMES, LABELS)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._images, self._places, self._labels = (
            stack.enter_context((folder / name).open("wb")) for name in (IMAGES, PLACES, LABELS)
        )
        self._names_path, self._names = folder / NAMES, dict[int, str]()
        self.written_bytes = 0

    def put(self, at: int, images: Images, labels: Labels, files: Sequence[EncodedImage]) -> None:
        import numpy as np

        sizes = np.array([len(file.content) for file in files], dtype=np.int64)
        ends = self.written_bytes + np.cumsum(sizes)
        self._images.writelines(file.content for file in files)
        _write(self._places, 16 * at, np.stack([ends - sizes, ends], axis=1).astype("<i8"))
        _write(self._labels, 8 * at, labels.astype("<i8"))
        self._names.update(enumerate((file.name for file in files), at))
        self.written_bytes = int(ends[-1])

    def finish(self) -> None:
        write_json(self._names_path, [name for _, name in sorted(self._names.items())])
        _flush(self._images, self._places, self._labels)


def _write(file: IO[bytes], place: int, values: npt.NDArray[np.generic]) -> None:
    file.seek(place)
    file.write(values.data)


def _flush(*files: IO[bytes]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
