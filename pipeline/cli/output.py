"""What a verb tells the person."""

from __future__ import annotations

import sys
from pathlib import Path


def say(text: str) -> None:
    """One line (or several) on stdout, at once."""
    print(text, flush=True)


def command() -> str:
    """What the person typed before the verb: ``paceline``, or ``doit``, which does the same."""
    return "paceline" if Path(sys.argv[0]).name == "paceline" else "doit"
