"""Text of others as a terminal may be given it: what would move its cursor or turn its direction is escaped. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def printable(text: str) -> str:
    """With escapes for what would move a terminal's cursor, set its colours or turn its direction."""
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """The same of a text that has lines and tabs of its own."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def shell_line(words: Iterable[str]) -> str:
    """The command line of these words on one line, to be copied; what isn't printable as bash and zsh write it."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _is_shown(char: str) -> bool:
    if char.isprintable():
        return True
    import unicodedata  # for few texts

    return unicodedata.category(char) == "Zs"  # such as the wide space of Chinese text


def _escaped(word: str) -> str:
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(char if char.isprintable() else _code(ord(char)) for char in quoted)


def _code(point: int) -> str:
    """A shell takes ``\\x9b`` for a byte, not for the character."""
    return f"\\x{point:02x}" if point < 0x80 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
