"""docs/images/packages.svg is drawn of today's imports, and all of them lead down."""

from __future__ import annotations

from tests.architecture import picture


def test_the_picture_of_the_packages_is_current() -> None:
    drawn = picture.PICTURE.read_text(encoding="utf-8")
    assert drawn == picture.svg(), "draw it anew: python -m tests.architecture.picture"
