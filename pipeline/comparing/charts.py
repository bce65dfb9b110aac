"""Data types and value ranges of charts, without matplotlib, which draws them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORMATS = ("pdf", "png", "svg")
COLOURS = 8
"""Further curves are grey, because more colours are hard to distinguish."""
LEVELS = 5
"""Shades of a value, from the worst to the best."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A box of a graph with up to two lines.

    ``state`` is done, todo, failed or ''; ``needs`` are names of other boxes.
    """

    name: str
    lines: tuple[str, ...]
    state: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A trial in parallel coordinates: its title and its value on each axis (None: no value)."""

    title: str
    values: tuple[float | str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A coloured cell of a table: the lines in it, and how dark it is (from 0 to LEVELS - 1; None: no colour)."""

    row: int
    column: int
    lines: tuple[str, ...]
    level: int | None
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of time in a row, in seconds. ``ink`` is a colour of the page (``good``, ``bad``, ``c0``)."""

    row: int
    begin: float
    end: float
    ink: str
    text: str = ""
    title: str = ""


def level(share: float) -> int:
    """Return the level of a value between 0 and 1."""
    return max(0, min(LEVELS - 1, int(share * LEVELS)))


def span_of(values: Iterable[float], *, log: bool) -> tuple[float, float] | None:
    """Return the least and greatest drawable value (above 0 on a logarithmic axis), or None.

    Values beyond 1e300 are dropped, because their distance is infinite; values closer to 0 than its inverse count as 0.
    """
    known = [value if abs(value) > 1e-300 else 0.0 for value in values if abs(value) < 1e300]
    kept = [value for value in known if value > 0 or not log]
    return (min(kept), max(kept)) if kept else None


def within(span: tuple[float, float], value: float) -> float:
    return min(span[1], max(span[0], value))
