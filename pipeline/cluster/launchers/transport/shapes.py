"""Check the types of a JSON value that comes from elsewhere. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.core.printable import printable

_LONGEST = 60  # characters of a value that a message shows


class Kind(NamedTuple):
    """A value: its name in messages, and whether one is of that kind."""

    words: str
    holds: Callable[[Any], bool]


class Maybe(NamedTuple):
    """A shape whose field may be null or absent."""

    shape: Any


class Either(NamedTuple):
    """One of several shapes. A value that has none of them is described by its mismatch with the first."""

    shapes: tuple[Any, ...]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63


def whole(below: int, words: str = "a whole number from 0") -> Kind:
    """Return the kind of whole numbers from 0 to ``below``, exclusive."""
    return Kind(words, lambda value: _is_number(value) and isinstance(value, int) and 0 <= value < below)


def matching(pattern: str, words: str) -> Kind:
    """Return the kind of texts whose beginning matches, as that of a version does.

    A pattern for the whole text ends with ``\\Z``; ``$`` would also match in front of a last line break.
    """
    return Kind(words, lambda value: isinstance(value, str) and re.match(pattern, value, re.ASCII) is not None)


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", lambda value: _is_number(value) and math.isfinite(value))
WHOLE = whole(1 << 63)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))


def wrong(value: Any, shape: Any, path: str = "") -> str:
    """Describe the first part of ``value`` that doesn't have the ``shape``; '': all of it has.

    A shape is a ``Kind``, ``Maybe`` or ``Either``, ``[shape]`` for a list, ``(shape, shape)`` for one of that length,
    ``{name: shape}`` for a mapping with these fields (and others), ``{"*": shape}`` for one with names of its own.
    """
    match shape:
        case Kind(words, holds):
            return "" if holds(value) else _mismatch(value, path, words)
        case Maybe(inner):
            return "" if value is None else wrong(value, inner, path)
        case Either(shapes):
            faults = [wrong(value, one, path) for one in shapes]
            return "" if "" in faults else faults[0]
        case dict():
            return _wrong_object(value, shape, path)
        case list():
            if not isinstance(value, list):
                return _mismatch(value, path, "a list")
            return _wrong_item(value, shape * len(value), path)
        case tuple():
            if not isinstance(value, list) or len(value) != len(shape):
                return _mismatch(value, path, f"a list of {len(shape)}")
            return _wrong_item(value, shape, path)
    raise TypeError(f"{shape!r} is no shape")


def _wrong_object(value: Any, shape: Mapping[str, Any], path: str) -> str:
    if not isinstance(value, Mapping):
        return _mismatch(value, path, "an object")
    for name in value if "*" in shape else shape:
        part = shape["*"] if "*" in shape else shape[name]
        place = f"{path}.{name}" if path else str(name)
        if name not in value and not isinstance(part, Maybe):
            return f"no {place}"
        if why := wrong(value.get(name), part, place):
            return why
    return ""


def _wrong_item(value: Sequence[Any], shapes: Sequence[Any], path: str) -> str:
    whys = (wrong(item, shape, f"{path}[{at}]") for at, (item, shape) in enumerate(zip(value, shapes, strict=True)))
    return next(filter(None, whys), "")


def _mismatch(value: Any, path: str, wanted: str) -> str:
    text = printable(repr(value))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{printable(path)} = {shown} in place of {wanted}"
