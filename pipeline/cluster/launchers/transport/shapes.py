"""Check the types of a JSON value that comes from elsewhere. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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
    """One of several shapes."""

    shapes: tuple[Any, ...]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63


def whole(below: int, words: str = "a whole number from 0") -> Kind:
    """Return the kind of whole numbers from 0 to ``below``, exclusive."""
    return Kind(words, lambda value: _is_number(value) and isinstance(value, int) and 0 <= value < below)


def matching(pattern: str, words: str) -> Kind:
    """Return the kind of texts whose beginning matches."""
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
        case dict() if not isinstance(value, Mapping):
            return _mismatch(value, path, "an object")
        case dict():
            names = value if "*" in shape else shape
            parts = [(name, shape.get("*") or shape[name], f"{path}.{name}" if path else str(name)) for name in names]
            for name, one, place in parts:
                if name not in value and not isinstance(one, Maybe):
                    return f"no {place}"
                if why := wrong(value.get(name), one, place):
                    return why
            return ""
        case list() | tuple() if not isinstance(value, list) or (isinstance(shape, tuple) and len(shape) != len(value)):
            return _mismatch(value, path, f"a list of {len(shape)}" if isinstance(shape, tuple) else "a list")
    kinds = shape if isinstance(shape, tuple) else shape * len(value)
    whys = (wrong(item, one, f"{path}[{at}]") for at, (item, one) in enumerate(zip(value, kinds, strict=True)))
    return next(filter(None, whys), "")


def _mismatch(value: Any, path: str, wanted: str) -> str:
    text = printable(repr(value))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{printable(path)} = {shown} in place of {wanted}"
