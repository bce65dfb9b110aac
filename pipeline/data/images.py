"""The reader of encoded images: makes a RawSet of an ImageSource. Threads decode images while ``packing`` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING

from pipeline.core.errors import DataError
from pipeline.core.processes import threads
from pipeline.data.base import EncodedImage, ImageFilesConfig, ImageItem, ImageSource, Part, RawSet, images_per_block
from pipeline.data.progress import OnProgress
from trainers.core.config import image_sides
from trainers.data.image_files import BrokenImageError, Geometry, header, pixels

if TYPE_CHECKING:
    from pipeline.data.base import EncodedBlock

_DEFAULT_SIDE = 224  # side length in pixels if images differ or are larger
_GROUP = 16  # images per decoding task
_HEADERS = 16  # files per header-reading task
_MOST_NAMED = 8  # broken images that an error lists


@dataclass
class _Survey:
    """What the headers say of all images of a part."""

    count: int = 0
    size: tuple[int, int] | None = None  # height and width of the first image
    is_one_size: bool = True
    is_grey: bool = True


def raw_set(source: ImageSource, config: ImageFilesConfig, report: OnProgress) -> RawSet:
    """Read each image's header; choose size, channels, and whether the pack keeps the files. Raises DataError."""
    # a hold-out takes the place of the source's own test images
    names = [name for name in source.parts if name != "test" or not config.holdout]
    # all headers first, so that broken files are found before anything is written
    surveys = {name: _survey(source, name, report) for name in names}
    height, width = image_sides("dataset.image_size", config.image_size) or _size(list(surveys.values()))
    channels = config.channels or (1 if all(survey.is_grey for survey in surveys.values()) else 3)
    geometry = Geometry(height=height, width=width, channels=channels, resize=config.resize)
    decoded_bytes = sum(survey.count for survey in surveys.values()) * channels * height * width
    encoded = decoded_bytes > config.decoded_limit * 2**30
    parts = {name: _part(source, name, survey.count, geometry, encoded=encoded) for name, survey in surveys.items()}
    return RawSet(
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        shape=(channels, height, width),
        classes=source.classes,
        source=source.description,
        origin=source.origin,
        encoding={"resize": config.resize} if encoded else None,
    )


def _size(surveys: list[_Survey]) -> tuple[int, int]:
    """Return the size that all images have, if it isn't larger than the default; else the default."""
    size = surveys[0].size
    is_common = all(survey.is_one_size and survey.size == size for survey in surveys)
    return size if is_common and size is not None and max(size) <= _DEFAULT_SIDE else (_DEFAULT_SIDE, _DEFAULT_SIDE)


def _survey(source: ImageSource, name: str, report: OnProgress) -> _Survey:
    survey, broken = _Survey(), list[str]()
    groups = _grouped(source.parts[name](), _HEADERS)
    for headers, errors in threads.in_order(_headers, groups, workers=_workers()):
        broken += errors
        for height, width, is_grey in headers:
            survey.size = survey.size or (height, width)
            survey.is_one_size &= survey.size == (height, width)
            survey.is_grey &= is_grey
        survey.count += len(headers)
        report(f"looking at the {name} images", 0, None)
    if broken:
        more = f" and {len(broken) - _MOST_NAMED} more" if len(broken) > _MOST_NAMED else ""
        raise DataError(
            f"{source.origin}: {len(broken)} of {survey.count + len(broken)} images can't be read: "
            f"{'; '.join(broken[:_MOST_NAMED])}{more}",
            hint="put good copies in their place, or take them out",
        )
    return survey


def _headers(items: list[ImageItem]) -> tuple[list[tuple[int, int, bool]], list[str]]:
    """Return (height, width, is grey) of each readable image, and ``name: reason`` of each broken one."""
    sizes, broken = list[tuple[int, int, bool]](), list[str]()
    for item in items:
        try:
            with item.open() as file:
                image = header(file)
            sizes.append((image.height, image.width, image.is_grey))
        except BrokenImageError as error:
            broken.append(f"{item.name}: {error}")
    return sizes, broken


def _part(source: ImageSource, name: str, count: int, geometry: Geometry, *, encoded: bool) -> Part:
    shape = (geometry.channels, geometry.height, geometry.width)
    group = min(_GROUP, images_per_block(shape))

    def blocks() -> Iterator[EncodedBlock]:
        return threads.in_order(
            lambda items: _decoded(items, geometry, source.origin, encoded=encoded),
            _grouped(source.parts[name](), group),
            workers=_workers(),
        )

    return Part(
        count=count, blocks=lambda: (block for block, _ in blocks()), encoded_blocks=blocks if encoded else None
    )


def _decoded(items: list[ImageItem], geometry: Geometry, origin: str, *, encoded: bool) -> EncodedBlock:
    # An encoded pack needs the pixels too, for their mean and standard deviation.
    files, planes = list[EncodedImage](), list[bytes]()
    for item in items:
        try:
            with item.open() as file:
                content = file.read() if encoded else b""
                planes.append(pixels(BytesIO(content) if encoded else file, geometry))
        except BrokenImageError as error:
            raise DataError(
                f"{origin}: {item.name}: {error}", hint="put a good copy in its place, or take it out"
            ) from error
        files.append(EncodedImage(item.name, content))
    return (b"".join(planes), [item.label for item in items]), files


def _grouped(items: Iterator[ImageItem], size: int) -> Iterator[list[ImageItem]]:
    while group := list(islice(items, size)):
        yield group


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
