"""Choose fonts for pictures: matplotlib's own font lacks Chinese, Japanese and Korean characters.

If no installed font has the characters, a name is replaced by a number instead of a row of boxes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache

from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.ft2font import FT2Font

_FIRST = "DejaVu Sans"  # matplotlib's own
_PLACEHOLDERS = "Last Resort"  # draws a box for each character


def drawable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return font families in order of preference, and the names in drawable form.

    A name that no family can draw becomes ``#`` and its number.
    """
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
    """Return the installed family with most of these characters; None if none has any."""
    counts = {name: sum(ord(char) in characters(name) for char in wanted) for name in sorted(installed() - {_FIRST})}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] else None


def installed() -> set[str]:
    """Return the families with a face of regular weight."""
    usual = {font.name for font in fontManager.ttflist if font.style == "normal" and font.weight in (400, "normal")}
    return {name for name in usual if not name.startswith(_PLACEHOLDERS)}


def characters(family: str) -> Container[int]:
    """Return the code points that the family has."""
    return FT2Font(fontManager.findfont(FontProperties(family=[family]))).get_charmap()
