"""docs/images/packages.svg is drawn of today's imports, and all of them lead down."""

from __future__ import annotations

import pytest

from tests.architecture import picture


def test_the_picture_of_the_packages_is_current() -> None:
    drawn = picture.PICTURE.read_text(encoding="utf-8")
    assert drawn == picture.svg(), "draw it anew: python -m tests.architecture.picture"


@pytest.mark.slow
def test_every_import_between_packages_leads_to_one_that_stands_below() -> None:
    for half, layers in picture.layers().items():
        row = {name: at for at, layer in enumerate(layers) for name in layer}
        found = picture.imports(half, list(row))
        assert len(found) > 10
        assert [edge for edge in found if row[edge[0]] >= row[edge[1]]] == []


def test_an_arrow_that_others_imply_is_left_out() -> None:
    chain = {("a", "b"), ("b", "c"), ("c", "d")}
    assert picture.reduced(chain | {("a", "c"), ("a", "d")}) == chain
