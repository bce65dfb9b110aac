"""Images of a pack that keeps the files as they came: decoded by threads, ahead of the step that wants them.

A random-resized crop (Szegedy et al.: Going deeper with convolutions, 2014) is cut from the file itself. What was drawn
for it stands in the epoch's plan, so it is the same on whichever rank the image is decoded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from trainers.core.errors import TrainerError
from trainers.data.gather import RowReader, Rows, Wanted
from trainers.data.image_files import BrokenImageError, Crop, Geometry, pixels
from trainers.data.pack import Manifest

_GROUP = 4  # images that a thread decodes before it looks for more
_DRAWN = 1 << 24  # what is drawn for a crop lies below
_PROPORTIONS = (3 / 4, 4 / 3)


def reader(
    folder: Path, manifest: Manifest, places: Tensor, labels: Tensor, device: torch.device, smallest_crop: float
) -> EncodedReader:
    """The reader of a pack. ``places`` and ``labels`` are on the CPU."""
    geometry = Geometry(
        height=manifest.height, width=manifest.width, channels=manifest.channels, **(manifest.encoding or {})
    )
    return EncodedReader(folder, geometry, places, labels, device, smallest_crop=smallest_crop)


def _cores() -> int:
    """The cores that this rank may use; macOS names none, and there it is all of the computer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EncodedReader(RowReader):
    """Decodes the images of ``folder``.

    Args:
        places: int64 [N, 2], where in images.bin each file begins and ends.
        labels: int64 [N].
        smallest_crop: the least share of an image's area that a crop has, where crops are wanted.
        workers: threads; None: as many as this rank has cores.
    """

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        places: Tensor,
        labels: Tensor,
        device: torch.device,
        *,
        smallest_crop: float = 0.0,
        workers: int | None = None,
    ) -> None:
        super().__init__(device, workers or _cores())
        self._folder, self._geometry, self._smallest_crop = folder, geometry, smallest_crop
        self._places, self._labels = places, labels
        self._file = os.open(folder / "images.bin", os.O_RDONLY)
        self._image = torch.empty(1, geometry.channels, geometry.height, geometry.width, dtype=torch.uint8)

    @torch.inference_mode(False)  # threads couldn't write into what an evaluation made in that mode
    def _begin(self, wanted: Wanted) -> Callable[[], Rows]:
        count = len(wanted.places)
        images = self._empty(count, self._image)
        labels = torch.index_select(self._labels, 0, wanted.places, out=self._empty(count, self._labels))
        crops = [None] * count if wanted.crops is None else wanted.crops.tolist()
        numbers = wanted.places.tolist()
        work: list[Future[None]] = []
        for begin in range(0, count, _GROUP):
            part = slice(begin, begin + _GROUP)
            work.append(self._pool.submit(self._decode, numbers[part], crops[part], images[part]))

        def rows() -> Rows:
            for future in work:
                future.result()
            return images, labels

        return rows

    def _decode(self, numbers: list[int], crops: list[list[int] | None], out: Tensor) -> None:
        """Raises TrainerError that names the image."""
        planes = bytearray()
        for number, drawn, (begin, end) in zip(numbers, crops, self._places[numbers].tolist(), strict=True):
            content = os.pread(self._file, end - begin, begin)  # not the mapping: it would keep other threads waiting
            crop = None if drawn is None else _crop(drawn, self._smallest_crop)
            try:
                planes += pixels(BytesIO(content), self._geometry, crop)
            except BrokenImageError as error:
                name = json.loads((self._folder / "names.json").read_text(encoding="utf-8"))[number]
                raise TrainerError(f"{self._folder}: image {number} ({name}): {error}") from error
        out.copy_(torch.frombuffer(planes, dtype=torch.uint8).view(out.shape))


def _crop(drawn: list[int], smallest: float) -> Crop:
    area, proportions, across, down = (value / _DRAWN for value in drawn)
    low, high = map(math.log, _PROPORTIONS)
    return Crop(
        area=smallest + (1 - smallest) * area,
        proportions=math.exp(low + (high - low) * proportions),
        across=across,
        down=down,
    )
