"""A text as the value of a Hydra override, so that a word which a message gives works when it is typed. Pure."""

from __future__ import annotations

import re

from pipeline.core.printable import shell_line

_BARE = re.compile(r"0|[1-9][0-9]*|(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w/.:-]*", re.IGNORECASE)
_ESCAPED = re.compile(r"[\"$`]|\\(?=[\"$`\\])")  # what takes a backslash inside a shell's double quotes
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def hydra_value(text: str) -> str:
    """Bare where Hydra would take it for nothing else, else in single quotes (where only a quote ends a backslash)."""
    return text if _BARE.fullmatch(text) else hydra_quoted(text)


def hydra_quoted(text: str) -> str:
    """In single quotes, whatever it holds; ``${`` is no interpolation."""
    literal = text.replace("${", "\\${")
    return "'" + _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"


def shell_word(override: str) -> str:
    """The override as one word of a shell: in double quotes where it holds a value in single ones, which is easiest to
    read. Not where it has a ``!``, which an interactive shell replaces there."""
    if "'" not in override or "!" in override or not override.isprintable():
        return shell_line([override])
    return f'"{_ESCAPED.sub(lambda found: chr(92) + found[0], override)}"'
