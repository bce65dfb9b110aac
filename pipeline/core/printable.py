"""Make text from outside safe for a terminal, a shell and Hydra: escape control characters, quote arguments.

Such text comes from the ranks' output, from hosts and from the command line.
"""

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
_LOCAL_PREFIX = re.compile(r"(?m)^(trial +\d+ \| )?localhost:(-|\d+) \| ")
"""The beginning of a log line of this computer: in a sweep the trial, then the rank, or ``-`` for torchrun itself."""


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
    """Make another program's output printable, and remove sequences that move the cursor.

    Colours stay if ``colours``. Tabs become spaces if the output is for a ``terminal``.
    """
    return "\n".join(_program_line(line, terminal, colours) for line in text.split("\n"))


def without_host(text: str) -> str:
    """Remove ``localhost:RANK | `` from log lines; lines of ranks other than 0 keep ``rank RANK | ``."""

    def shortened(prefix: re.Match[str]) -> str:
        trial, rank = prefix[1] or "", prefix[2]
        return trial if rank in ("-", "0") else f"{trial}rank {rank} | "

    return _LOCAL_PREFIX.sub(shortened, text)


def _program_line(line: str, terminal: bool, colours: bool) -> str:
    line = _CURSOR.sub("", line) if "\x1b" in line else line
    parts = _COLOURS.split(line)  # the texts between the colour codes
    if terminal:
        safe = [printable(part.expandtabs()) for part in parts]
    else:
        safe = ["\t".join(map(printable, part.split("\t"))) for part in parts]
    if not colours or len(parts) == 1:
        return "".join(safe)
    # n codes stand between n + 1 texts; a reset follows the last one, so that the colour ends with the line
    return "".join(f"{part}{code}" for part, code in zip(safe, [*_COLOURS.findall(line), _RESET], strict=True))


def shell_line(words: Iterable[str]) -> str:
    """Quote arguments as one command line to copy."""
    return " ".join(map(shell_word, words))


def _ansi_c_escaped(word: str) -> str:
    """Escape a word for a shell's ``$'…'``."""
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(char if char.isprintable() else _ansi_c_code(ord(char)) for char in quoted)


def _ansi_c_code(point: int) -> str:
    r"""Write a character beyond ASCII as ``\u`` or ``\U``: a shell takes ``\x9b`` for a byte, not for the character."""
    if point < 0x80:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


# What Hydra's grammar reads as the same string without quotes.
_BARE = re.compile(r"0|[1-9][0-9]*|(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w/.:-]*", re.IGNORECASE)
_IN_DOUBLE_QUOTES = re.compile(r"[\"$`]|\\(?=[\"$`\\])")  # characters that need a backslash in a shell's double quotes
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")  # backslashes before a quote, or before the closing one at the end
_INTERPOLATION = re.compile(r"(\\*)\$\{")  # Hydra halves the backslashes in front of ${


def hydra_value(text: str) -> str:
    """Return the value bare if Hydra would parse it as the same string, else in single quotes."""
    return text if _BARE.fullmatch(text) else hydra_quoted(text)


def hydra_quoted(text: str) -> str:
    """Quote any text for Hydra in single quotes, with ``${`` escaped."""
    # inside single quotes Hydra takes backslashes for escapes only in front of a quote
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
    """Quote a word for a shell if needed, readable if possible.

    A word with single quotes, such as an override's value, comes into double quotes, but not one with ``!``, which an
    interactive shell expands there. An unprintable word needs the ``$'…'`` syntax of bash and zsh.
    """
    if not word.isprintable():
        return f"$'{_ansi_c_escaped(word)}'"
    if "'" not in word or "!" in word:
        return shlex.quote(word)
    return f'"{_IN_DOUBLE_QUOTES.sub(lambda match: chr(92) + match[0], word)}"'  # chr(92): a backslash
