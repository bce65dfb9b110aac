"""Addresses as files and messages may hold them: without user names, passwords and signatures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
LOGIN = re.compile(r"(?<=://)[^\s/?#'\"]+@")  # greedy: a password may hold an unescaped @
_SIGNATURE = re.compile(r"(://[^\s?#'\"]*)\?[^\s'\"]*")  # the query of a signed URL opens what it names


def without_logins(text: str) -> str:
    """``https://user:password@host`` → ``https://***@host``."""
    return LOGIN.sub(f"{HIDDEN}@", text)


def in_word(word: str) -> str:
    """A word of a command line, shown alike."""
    word = without_logins(word)
    return _SIGNATURE.sub(r"\1", word) if word.lstrip("+").startswith("dataset.source=") else word


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without logins in addresses and without the query of the data's address."""
    shown: dict[str, Any] = {name: _shown(value) for name, value in config.items()}
    dataset = shown.get("dataset")
    if isinstance(dataset, dict) and isinstance(dataset.get("source"), str):
        dataset["source"] = _SIGNATURE.sub(r"\1", dataset["source"])
    return shown


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return without_logins(value) if isinstance(value, str) and "://" in value else value
