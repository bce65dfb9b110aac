"""Settings shared by all data sets of image files (standard library only, because every composition reads them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.core.config import DatasetConfig, check_images


@dataclass(kw_only=True)
class ImageFilesConfig(DatasetConfig):
    """A data set whose images are files, or would be: they are cut, resized and decoded as these fields say.

    Attributes:
        image_size: pixels, 224 or [height,width]; the middle of each image is cut out in these proportions and resized.
            null: the size of the images where all have one of at most 224, else 224.
        resize: pixels of the shorter side before image_size is cut out of the middle; null: as many as that has.
        channels: 3 (colour), 1 (grey), or null: grey where all images are.
        decoded_limit: GiB; a pack that would have more pixels keeps the files, and the ranks decode them.
    """

    image_size: Any = None
    resize: int | None = None
    channels: int | None = None
    decoded_limit: float = 8.0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        check_images(self.image_size, self.resize, self.channels, self.decoded_limit)
