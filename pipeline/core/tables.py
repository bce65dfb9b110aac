"""Text in columns, and numbers with their nouns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, two spaces between. ``rows`` holds at least one row, and all are of one length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
