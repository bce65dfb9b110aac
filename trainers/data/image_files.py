"""The decoder of image files, for the controller (`doit fetch`), the nodes and `doit predict`. An image is turned
upright by its EXIF data, converted to RGB or grey (of 16 bits the upper eight), cut to the wanted proportions and
resized (bilinear, antialiased). The same file and settings give the same pixels everywhere. Needs Pillow, and neither
torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import IO

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_ORIENTATION = 0x0112  # the EXIF tag
_ON_ITS_SIDE = 5  # EXIF orientations 5 to 8 swap width and height
_GREY = ("1", "L", "LA", "I;16", "I;16L", "I;16B")
_SIXTEEN_BITS = {"I;16": 1, "I;16L": 1, "I;16B": 0}  # mode → offset of a pixel's upper byte
_ACCEPTED = (*_GREY, "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_FINER = 2  # a JPEG is decoded at 1/2, 1/4 or 1/8, which is fast, if it stays this many times larger than the output

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels of the upright image."""


class BrokenImageError(ValueError):
    """The file is no readable image; the message says why, without the file's name."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The size and channels of decoded images; ``resize``: pixels of the shorter side before the centre is cut out."""

    height: int
    width: int
    channels: int
    resize: int | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """Properties of an image that are known before decoding: its upright size, and whether it is grey."""

    height: int
    width: int
    is_grey: bool


def header(file: IO[bytes]) -> Header:
    """Read an image's header. Raises BrokenImageError."""
    image = _opened(file)
    width, height = image.size if _orientation(image) < _ON_ITS_SIDE else image.size[::-1]
    return Header(height=height, width=width, is_grey=image.mode in _GREY)


def pixels(file: IO[bytes], geometry: Geometry, crop: Crop | None = None) -> bytes:
    """Decode an image to uint8 [C, H, W] in C order, cut from the centre or by ``crop``. Raises BrokenImageError."""
    image = _opened(file)
    upright = image.size if _orientation(image) < _ON_ITS_SIDE else image.size[::-1]
    box = centre_box(*upright, geometry) if crop is None else crop.box(*upright, geometry)
    left, upper, right, lower = box
    image = _loaded(image, (right - left) / geometry.width)
    image = _converted(image, "L" if geometry.channels == 1 else "RGB")
    # the JPEG may have been decoded at a smaller scale: scale the box, too
    shrunk_x, shrunk_y = image.width / upright[0], image.height / upright[1]
    inside = (
        max(0.0, left * shrunk_x),
        max(0.0, upper * shrunk_y),
        min(float(image.width), right * shrunk_x),
        min(float(image.height), lower * shrunk_y),
    )
    image = image.resize((geometry.width, geometry.height), Image.Resampling.BILINEAR, box=inside)
    if geometry.channels == 1:
        return image.tobytes()
    return b"".join(image.tobytes("raw", band) for band in "RGB")


def centre_box(width: int, height: int, geometry: Geometry) -> Box:
    """Return the largest box in the centre of an image that has the proportions of the output; with ``resize``, the
    smaller one that becomes the output when the image's shorter side is scaled to ``resize`` pixels.
    """
    scale = min(width / geometry.width, height / geometry.height)  # image pixels per output pixel
    if geometry.resize is not None:
        scale *= min(geometry.height, geometry.width) / geometry.resize
    across, down = geometry.width * scale, geometry.height * scale
    left, upper = (width - across) / 2, (height - down) / 2
    return left, upper, left + across, upper + down


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A random crop, drawn before the image's size is known."""

    area: float  # as a share of the image's
    proportions: float  # relative to the output's
    across: float  # place between the left (0) and the right (1) edge
    down: float

    def box(self, width: int, height: int, geometry: Geometry) -> Box:
        """Return the crop in whole pixels. If it exceeds the image, it is shrunk, and keeps its proportions."""
        proportions = self.proportions * geometry.width / geometry.height
        crop_width = math.sqrt(width * height * self.area * proportions)
        crop_height = crop_width / proportions
        fits = min(1.0, width / crop_width, height / crop_height)
        # rounding makes the box independent of the last bit of the square root
        w, h = max(1, round(crop_width * fits)), max(1, round(crop_height * fits))
        w, h = min(w, width), min(h, height)
        left, upper = round(self.across * (width - w)), round(self.down * (height - h))
        return left, upper, left + w, upper + h


def _opened(file: IO[bytes]) -> Image.Image:
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
    except Exception as error:  # decoders raise a dozen unrelated types for broken files
        raise BrokenImageError(_why(file, error)) from error
    if image.mode not in _ACCEPTED:
        raise BrokenImageError(f"its pixels are of mode {image.mode}; wanted: 8 or 16 bits, grey or colour")
    return image


def _why(file: IO[bytes], error: Exception) -> str:
    size_bytes = file.seek(0, 2)
    if size_bytes == 0:
        return "it is empty (0 bytes)"
    if isinstance(error, UnidentifiedImageError):
        return f"its {size_bytes:,} bytes are no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"
    return f"{type(error).__name__}: {error}"


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # ignore invalid EXIF data
        return 1


def _loaded(image: Image.Image, scale: float) -> Image.Image:
    """Decode all pixels and turn them upright. ``scale``: image pixels per output pixel."""
    orientation = _orientation(image)
    try:
        if scale >= 2 * _FINER:
            image.draft(None, tuple(math.ceil(side * _FINER / scale) for side in image.size))  # type: ignore[arg-type]
        image.load()
    except Exception as error:  # decoders raise many types
        raise BrokenImageError(f"it is broken or cut off ({error or type(error).__name__})") from error
    return image if orientation == 1 else ImageOps.exif_transpose(image)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode in _SIXTEEN_BITS:  # Pillow's own conversion clips
        image = Image.frombytes("L", image.size, image.tobytes()[_SIXTEEN_BITS[image.mode] :: 2])
    return image if image.mode == mode else image.convert(mode)
