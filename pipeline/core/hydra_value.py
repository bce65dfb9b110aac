"""A text as the value of a Hydra override, so that a word which a message gives works when it is typed. Pure."""

from __future__ import annotations

import re
import shlex

_BARE = re.compile(r"0|[1-9][0-9]*|(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w/.:-]*", re.IGNORECASE)
_IN_DOUBLE_QUOTES = re.compile(r"[\"$`\\!\n]")  # what a shell makes something else of there
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def hydra_value(text: str) -> str:
    """Bare where Hydra would take it for nothing else, else in single quotes (where only a quote ends a backslash)."""
    return text if _BARE.fullmatch(text) else hydra_quoted(text)


def hydra_quoted(text: str) -> str:
    """In single quotes, whatever it holds; ``${`` is no interpolation."""
    literal = text.replace("${", "\\${")
    return "'" + _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"


def shell_word(override: str) -> str:
    """For a shell, as a person would type it: in double quotes where it holds a value in single ones."""
    plain = _IN_DOUBLE_QUOTES.search(override) is None
    return f'"{override}"' if "'" in override and plain else shlex.quote(override)
