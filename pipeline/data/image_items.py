"""A set of image files before any is opened: its parts, its classes, the name and label of each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, NamedTuple


class Item(NamedTuple):
    """An image: ``name`` as messages show it and as it stands in the pack."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


Items = Callable[[], Iterator[Item]]
"""Gives, each time it is called, all images of a part in order."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where images come from. ``parts``: train, val, test → items; ``text`` is what the manifest says of it."""

    parts: Mapping[str, Items]
    classes: tuple[str, ...]
    text: str
    origin: str
