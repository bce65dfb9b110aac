"""The reader of a pack that keeps the image files instead of pixels: threads decode images before the step that needs
them. ``trainers.data.pack`` imports this module by a computed name, because it needs Pillow. A random-resized crop
(Szegedy et al.: Going deeper with convolutions, 2014) is cut while decoding, by random numbers of the epoch's plan."""

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

from trainers.contract.data_pack import IMAGES, NAMES, Manifest
from trainers.core.errors import TrainerError
from trainers.data.image_files import BrokenImageError, Crop, Geometry, pixels
from trainers.data.pack import RowReader, RowRequest, Rows

_GROUP = 4  # images of one task for a thread
_DRAWN = 1 << 24  # upper bound of a crop's random numbers
_PROPORTIONS = (3 / 4, 4 / 3)


def reader(
    folder: Path, manifest: Manifest, places: Tensor, labels: Tensor, device: torch.device, smallest_crop: float
) -> EncodedReader:
    """Return the reader of a pack. ``places`` and ``labels`` are on the CPU; the other names as in EncodedReader."""
    geometry = Geometry(
        height=manifest.height, width=manifest.width, channels=manifest.channels, **(manifest.encoding or {})
    )
    return EncodedReader(folder, geometry, places, labels, device, smallest_crop=smallest_crop)


def _cores() -> int:
    """Return the number of cores that this rank may use; on macOS, all cores of the host."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EncodedReader(RowReader):
    """Decodes the images of ``folder``. ``places`` int64 [N, 2]: the start and end of each file in images.bin.

    ``smallest_crop``: smallest share of an image's area in a crop. ``workers``: threads; None: one per core.
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
        self._file = os.open(folder / IMAGES, os.O_RDONLY)
        self._image = torch.empty(1, geometry.channels, geometry.height, geometry.width, dtype=torch.uint8)

    @torch.inference_mode(False)  # the threads couldn't write into tensors created in inference mode
    def _begin(self, wanted: RowRequest) -> Callable[[], Rows]:
        count = len(wanted.samples)
        images = self._empty(count, self._image)
        labels = torch.index_select(self._labels, 0, wanted.samples, out=self._empty(count, self._labels))
        crops = [None] * count if wanted.crops is None else wanted.crops.tolist()
        numbers = wanted.samples.tolist()
        decoding: list[Future[None]] = []
        for begin in range(0, count, _GROUP):
            group = slice(begin, begin + _GROUP)
            decoding.append(self._pool.submit(self._decode, numbers[group], crops[group], images[group]))

        def wait_for_rows() -> Rows:
            for future in decoding:
                future.result()
            return images, labels

        return wait_for_rows

    def _decode(self, numbers: list[int], crops: list[list[int] | None], out: Tensor) -> None:
        """Decode the images with these numbers into ``out``. Raises TrainerError that names a broken image."""
        planes = bytearray()
        for number, drawn, (begin, end) in zip(numbers, crops, self._places[numbers].tolist(), strict=True):
            # not the mapping: a page fault on it would block the other threads
            content = os.pread(self._file, end - begin, begin)
            crop = None if drawn is None else _crop(drawn, self._smallest_crop)
            try:
                planes += pixels(BytesIO(content), self._geometry, crop)
            except BrokenImageError as error:
                name = json.loads((self._folder / NAMES).read_text(encoding="utf-8"))[number]
                raise TrainerError(f"{self._folder}: image {number} ({name}): {error}") from error
        out.copy_(torch.frombuffer(planes, dtype=torch.uint8).view(out.shape))


def _crop(drawn: list[int], smallest: float) -> Crop:
    """Turn four random numbers into a crop of at least the share ``smallest`` of an image's area."""
    area, proportions, across, down = (value / _DRAWN for value in drawn)
    low, high = map(math.log, _PROPORTIONS)
    return Crop(
        area=smallest + (1 - smallest) * area,
        proportions=math.exp(low + (high - low) * proportions),
        across=across,
        down=down,
    )
