"""Text in columns, and numbers with their nouns and units."""

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


def file_size(count_bytes: int) -> str:
    """``950 B``, ``1.3 MB``, ``21.0 GB``; a kB is 1000 B."""
    if count_bytes < 1000:
        return f"{count_bytes} B"
    amount = float(count_bytes)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if amount < 999.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} TB"


def duration(seconds: float) -> str:
    """``1.5 s``, ``2 min 05 s``, ``3 h 12 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def some_names(shown: Sequence[str], count: int = 0) -> str:
    """Names, with a sign that there are more where ``count`` says so; marks that no terminal shows are written out."""
    names = ", ".join(name if name.isprintable() else repr(name) for name in shown)
    return f"{names}, …" if count > len(shown) else names
