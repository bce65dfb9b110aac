"""Make foreign text safe for terminals and shells: escape control characters, quote arguments and Hydra values."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""SGR escape sequences: colours, bold, dim; no cursor movement."""
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
"""CSI sequences of progress bars: cursor movement, erasing."""
_RESET = "\x1b[0m"
_HERE = re.compile(r"(?m)^(trial +\d+ \| )?localhost:(-|\d+) \| ")
"""The beginning of a log line of this computer: in a sweep its trial, then its rank, or ``-`` for torchrun itself."""


def printable(text: str) -> str:
    """Escape characters that would move a terminal's cursor, set its colours or change the text direction."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or unicodedata.category(char) == "Zs"  # such as the ideographic space
        else char.encode("unicode_escape").decode()
        for char in text
    )


def printable_lines(text: str) -> str:
    """Apply ``printable`` to each line and expand tabs."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def takes_colours(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if the stream is a terminal that supports colours and NO_COLOR isn't set."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") not in ("dumb", "unknown")


def without_colours(text: str) -> str:
    return _COLOURS.sub("", text) if "\x1b" in text else text


def program_lines(text: str, *, terminal: bool, colours: bool) -> str:
    """Make another program's output printable; colours pass if allowed, and what moves the cursor is left out.

    Output not meant for a terminal keeps its tabs.
    """
    return "\n".join(_program_line(line, terminal, colours) for line in text.split("\n"))


def without_host(text: str) -> str:
    """Remove ``localhost:RANK | `` from log lines; lines of ranks other than 0 keep ``rank RANK | ``."""
    return _HERE.sub(lambda of: (of[1] or "") + ("" if of[2] in ("-", "0") else f"rank {of[2]} | "), text)


def _program_line(line: str, terminal: bool, colours: bool) -> str:
    line = _CURSOR.sub("", line) if "\x1b" in line else line
    parts = _COLOURS.split(line)
    safe = [printable(part.expandtabs()) if terminal else "\t".join(map(printable, part.split("\t"))) for part in parts]
    if not colours or len(parts) == 1:
        return "".join(safe)
    return "".join(f"{part}{code}" for part, code in zip(safe, [*_COLOURS.findall(line), _RESET], strict=True))


def shell_line(words: Iterable[str]) -> str:
    """Quote arguments as one command line to copy."""
    return " ".join(map(shell_word, words))


def _escaped(word: str) -> str:
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(char if char.isprintable() else _code(ord(char)) for char in quoted)


def _code(point: int) -> str:
    r"""Escape a character as ``\u``: a shell takes ``\x9b`` for a byte, not for the character."""
    return f"\\x{point:02x}" if point < 0x80 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


_BARE = re.compile(r"0|[1-9][0-9]*|(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w/.:-]*", re.IGNORECASE)
_IN_DOUBLE_QUOTES = re.compile(r"[\"$`]|\\(?=[\"$`\\])")  # needs a backslash inside a shell's double quotes
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")
_INTERPOLATION = re.compile(r"(\\*)\$\{")  # backslashes in front of one count double


def hydra_value(text: str) -> str:
    """Return the value bare if Hydra would parse it as the same string, else in single quotes."""
    return text if _BARE.fullmatch(text) else hydra_quoted(text)


def hydra_quoted(text: str) -> str:
    """Quote any text for Hydra in single quotes, with ``${`` escaped.

    Inside single quotes Hydra treats backslashes as escapes only in front of a quote.
    """
    literal = _INTERPOLATION.sub(lambda match: f"{match[1] * 2}\\${{", text)
    return "'" + _BEFORE_QUOTE.sub(lambda match: match[1] * 2 + ("\\'" if match[2] else ""), literal) + "'"


def hydra_text(value: Any) -> str:
    """Write a value of Python in Hydra's grammar, so that an override with it has the same value.

    Texts and paths are quoted, names of fields are not: Hydra's grammar has no quoted ones.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)  # not repr, which names numpy's type
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {hydra_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(hydra_text, value)) + "]"
    return hydra_quoted(str(value)) if isinstance(value, str | Path) else hydra_value(str(value))


def shell_word(word: str) -> str:
    """Quote a word for a shell: in double quotes, for readability, if it has single quotes (an override's value).

    One with ``!`` is quoted otherwise, because an interactive shell expands ``!`` inside double quotes; an unprintable
    one is quoted in the ``$'…'`` syntax of bash and zsh.
    """
    if not word.isprintable():
        return f"$'{_escaped(word)}'"
    if "'" not in word or "!" in word:
        return shlex.quote(word)
    return f'"{_IN_DOUBLE_QUOTES.sub(lambda match: chr(92) + match[0], word)}"'
