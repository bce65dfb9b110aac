"""Fonts of a picture: matplotlib's own has no Chinese, Japanese or Korean characters, and an installed one may.

Without any that has them a name would be a row of boxes; a number says more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache

from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.ft2font import FT2Font

_FIRST = "DejaVu Sans"  # matplotlib's own
_PLACEHOLDERS = "Last Resort"  # has a box for each character


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Families, in the order in which they are asked for a character, and the names as these can draw them: a name that
    they can't is ``#`` and its number."""
    if all(name.isascii() for name in names):
        return [_FIRST], [*names]
    families = {_FIRST: characters(_FIRST)}
    missing = {char for name in names for char in name if ord(char) not in families[_FIRST]}
    if missing and (more := _covering(frozenset(missing))) is not None:
        families[more] = characters(more)
        missing = {char for char in missing if ord(char) not in families[more]}
    return [*families], [f"#{at}" if missing.intersection(name) else name for at, name in enumerate(names)]


@cache
def _covering(wanted: frozenset[str]) -> str | None:
    """The installed family that has most of these characters; None where none has any."""
    counts = {name: sum(ord(char) in characters(name) for char in wanted) for name in sorted(installed() - {_FIRST})}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] else None


def installed() -> set[str]:
    """The families that have a face of usual weight."""
    usual = {font.name for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")}
    return {name for name in usual if not name.startswith(_PLACEHOLDERS)}


def characters(family: str) -> Container[int]:
    """The numbers of those that it has."""
    return FT2Font(fontManager.findfont(FontProperties(family=[family]))).get_charmap()
