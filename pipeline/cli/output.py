"""What a verb tells the person."""

from __future__ import annotations


def say(text: str) -> None:
    """One line (or several) on stdout, at once."""
    print(text, flush=True)
