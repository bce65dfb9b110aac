"""What charts show, and between which values: known without matplotlib, which draws them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORMATS = ("pdf", "png", "svg")
COLOURS = 8
"""Curves beyond these are grey: more colours look alike."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A box of a graph: up to two lines, ``state`` is done, todo, failed or ''; ``needs`` are names of others."""

    name: str
    lines: tuple[str, ...]
    state: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A trial of parallel coordinates: its title and its value on each axis (None: it has none there)."""

    title: str
    values: tuple[float | str | None, ...]


def span_of(values: Iterable[float], *, log: bool) -> tuple[float, float] | None:
    """The least and the greatest that can be drawn (on a logarithmic axis: above 0), or None. Beyond 1e300 a distance
    is infinite; nearer to 0 than its inverse it is 0."""
    known = [value if abs(value) > 1e-300 else 0.0 for value in values if abs(value) < 1e300]
    kept = [value for value in known if value > 0 or not log]
    return (min(kept), max(kept)) if kept else None


def within(span: tuple[float, float], value: float) -> float:
    return min(span[1], max(span[0], value))
