"""The description of an image data set before any file is opened: parts, classes, and names and labels of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, NamedTuple


class Item(NamedTuple):
    """One image; ``name`` appears in messages and in the pack."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


Items = Callable[[], Iterator[Item]]
"""A function that yields all images of a part in order, each time it is called."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The images of a data set. ``parts``: train, val, test → items; ``text`` describes the source in the manifest."""

    parts: Mapping[str, Items]
    classes: tuple[str, ...]
    text: str
    origin: str
