"""What a verb tells the person."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from pipeline.cli.verbosity import QUIET, is_wanted, verbosity
from pipeline.core import unexpected
from pipeline.core.printable import printable_lines
from pipeline.core.tables import ENDLESS

_HINT = "\n  try: "
_UNREAD = (
    "nobody reads this command's output any more; it goes on without: doit status watch=1 shows how far it is, "
    "doit stop ends it"
)


def say(text: str, *, painted: bool = False) -> None:
    """One line (or several) on stdout, at once; what came from elsewhere moves no terminal's cursor.

    Args:
        painted: it has colours of ours.
    """
    print(text if painted or not sys.stdout.isatty() else printable_lines(text), flush=True)


def say_usual(text: str) -> None:
    """A line that -v 0 leaves out."""
    if verbosity() != QUIET or is_wanted(text):
        say(text)


def width() -> int:
    """Columns of the terminal that shows stdout; where a file or another command reads it, no line is folded."""
    return shutil.get_terminal_size((ENDLESS, 24)).columns if sys.stdout.isatty() else ENDLESS


def command() -> str:
    """What the person typed before the verb: ``paceline``, or ``doit``, which does the same."""
    return "paceline" if Path(sys.argv[0]).name == "paceline" else "doit"


def as_typed(error: str) -> str:
    """An error whose hint names what this person types: a plain doit finds no project from its subfolders."""
    if command() == "doit":
        return error
    what, hint, rest = error.partition(_HINT)
    return what + hint + re.sub(r"\bdoit (?=[a-z])", f"{command()} ", rest)


def outlive_reader(error: BaseException) -> bool:
    """For ``masking.outlive``: where the reader of stdout has left (``| head -1``), say so once and go on."""
    if not unexpected.nobody_reads(error):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what still waits to be written, too
    with suppress(OSError):
        print(_UNREAD, file=sys.stderr, flush=True)
    return True
