"""Image files become pixels: sizes, channels, orientation, crops."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainers.data.image_files import Crop, Geometry, centre_box, pixels

pytestmark = pytest.mark.slow


def decoded(image: Image.Image, kind: str = "PNG", *, channels: int = 3, **geometry: Any) -> np.ndarray:
    """What becomes of a file of this image, [C, H, W]."""
    file = io.BytesIO()
    image.save(file, kind, **geometry.pop("saved", {}))
    shape = Geometry(**{"height": image.height, "width": image.width, **geometry}, channels=channels)
    return np.frombuffer(pixels(file, shape), np.uint8).reshape(channels, shape.height, shape.width)


def test_sixteen_bits_keep_their_upper_eight_and_none_is_clipped() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], dtype=np.uint16)
    assert decoded(Image.fromarray(values), channels=1).tolist() == [[[0, 0, 1, 0x12, 0xFF]]]


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "P", "1", "LA"])
def test_other_kinds_of_pixels_become_what_pillow_makes_of_them(mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    seen = decoded(image, "JPEG" if mode == "CMYK" else "PNG", saved={"quality": 100} if mode == "CMYK" else {})
    if mode == "CMYK":
        assert np.abs(seen.mean() - noise.mean()) < 8
    else:
        np.testing.assert_array_equal(seen, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_pixels_of_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"its 1,\d* bytes are no JPEG, PNG, WEBP or BMP image"):
        decoded(Image.new("F", (16, 16)), "TIFF")


def test_an_image_is_turned_as_its_orientation_says() -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 12))
    exif = Image.Exif()
    exif[0x0112] = 6  # a photo that was taken with the camera on its side
    turned = decoded(image, "PNG", channels=1, height=12, width=4, saved={"exif": exif})
    np.testing.assert_array_equal(turned[0], np.rot90(np.asarray(image), -1))


def test_the_middle_is_cut_out_in_the_wanted_proportions() -> None:
    assert centre_box(500, 375, Geometry(height=224, width=224, channels=3)) == (62.5, 0.0, 437.5, 375.0)
    assert centre_box(500, 400, Geometry(height=200, width=100, channels=3)) == (150.0, 0.0, 350.0, 400.0)
    smaller = centre_box(500, 400, Geometry(height=224, width=224, channels=3, resize=256))
    assert smaller == (75.0, 25.0, 425.0, 375.0)


def test_the_result_is_that_of_torchvision_s_resize_and_centre_crop() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    smooth = np.random.default_rng(0).integers(0, 255, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(smooth).resize((400, 300), Image.Resampling.BICUBIC)
    theirs = transforms.CenterCrop(96)(transforms.Resize(128)(image))
    ours = decoded(image, height=96, width=96, resize=128).transpose(1, 2, 0).astype(int)
    assert np.abs(ours - np.asarray(theirs)).mean() < 1.5


def test_a_large_photo_is_decoded_in_small_to_nearly_the_same_pixels() -> None:
    smooth = np.random.default_rng(0).integers(0, 255, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(smooth).resize((1600, 1200), Image.Resampling.BICUBIC)
    small = decoded(image, "JPEG", height=64, width=64, saved={"quality": 95}).astype(int)
    assert np.abs(small - decoded(image, height=64, width=64)).mean() < 2


def test_a_crop_lies_inside_whatever_was_drawn() -> None:
    geometry = Geometry(height=224, width=224, channels=3)
    random = np.random.default_rng(0)
    for width, height in ((500, 375), (10, 900), (1, 1), (900, 10)):
        for area, shape, across, down in random.random((200, 4)):
            crop = Crop(area=0.08 + 0.92 * area, proportions=0.75 + shape * 7 / 12, across=across, down=down)
            left, upper, right, lower = crop.box(width, height, geometry)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height
