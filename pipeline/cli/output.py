"""The output of verbs."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from typing import TextIO

from pipeline.cli import answers
from pipeline.cli.invocation import QUIET, as_typed, is_wanted, verbosity
from pipeline.core import masking
from pipeline.core.printable import inked_tracebacks, printable_lines, program_lines, takes_colours, without_host
from pipeline.core.processes import unexpected
from pipeline.core.tables import ENDLESS, folded

_UNREAD = "nobody reads this command's output any more"
_GOES_ON = "doit status shows how it stands"


STATE_INKS = {  # state → its colour in terminals (SGR parameter of ECMA-48)
    **dict.fromkeys(("FINISHED", "ACCEPTED", "REPRODUCED"), "32"),
    **dict.fromkeys(("FAILED", "ALTERED"), "31"),
    "KILLED": "33",
    "RUNNING": "36",
}
_INKS = {
    **{f"{state} ": ink for state, ink in STATE_INKS.items()},
    "ERROR: ": "1;31",
    "WARNING: ": "33",
    "warning: ": "33",
}


def inked(text: str, stream: TextIO) -> str:
    """Colour the first word if it is a state, and tracebacks, if the terminal shows colours."""
    if not takes_colours(stream, os.environ):
        return text
    text = inked_tracebacks(text)
    word = next((word for word in _INKS if text.startswith(word)), None)
    if word is None:
        return text
    return f"\x1b[{_INKS[word]}m{word.rstrip()}\x1b[0m{text[len(word.rstrip()) :]}"


def say(text: str, *, painted: bool = False) -> None:
    """Print lines on stdout at once; foreign text can't move the cursor.

    If the answer is JSON they go to stderr, and into the answer if it has no other data. ``painted``: the text has
    Paceline's own colours.
    """
    text = as_typed(text)
    if answers.wanted():
        answers.LINES.extend(text.splitlines())
        note(text)
        return
    print(text if painted or not sys.stdout.isatty() else inked(printable_lines(text), sys.stdout), flush=True)


def say_log(text: str) -> None:
    """Print lines of a rank or a step, or configuration values, on stdout; commands in them are left as they are."""
    if answers.wanted():
        answers.LINES.extend(text.splitlines())
        return
    is_terminal, colours = sys.stdout.isatty(), takes_colours(sys.stdout, os.environ)
    text = program_lines(without_host(text), terminal=is_terminal, colours=colours)
    print(inked_tracebacks(text) if colours else text, flush=True)


def note(text: str) -> None:
    """Print progress and warnings on stderr, so that stdout holds the result alone."""
    text = as_typed(text)
    print(inked(printable_lines(text), sys.stderr) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def say_usual(text: str) -> None:
    """Print a line of the result, except with -v 0."""
    if verbosity() != QUIET or is_wanted(text):
        say(text)


def note_usual(text: str) -> None:
    """Print progress, except with -v 0."""
    if verbosity() != QUIET or is_wanted(text):
        note(text)


def say_folded(text: str) -> None:
    """Print lines for users, folded between words at the terminal's width."""
    say(folded(as_typed(text), width()))  # a longer name may need a fold


def width() -> int:
    """Return the columns of stdout's terminal; without one, lines are not folded."""
    return shutil.get_terminal_size((ENDLESS, 24)).columns if sys.stdout.isatty() else ENDLESS


def outlive_reader(error: BaseException) -> bool:
    """For ``masking.outlive``: if stdout takes no more (``| head -1``, a full disk), say so once and continue."""
    if not unexpected.is_of_output(error):
        return False
    masking.silence(1)
    why = unexpected.error_message(error) if isinstance(error, masking.OutputError) else _UNREAD
    with suppress(OSError):
        print(as_typed(f"{why}; {_GOES_ON}"), file=sys.stderr, flush=True)
    return True
