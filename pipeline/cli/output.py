"""What a verb tells the person."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from typing import TextIO

from pipeline.cli import answers
from pipeline.cli.invocation import QUIET, is_wanted, verbosity
from pipeline.cli.verbs import VERBS
from pipeline.core import masking
from pipeline.core.printable import printable_lines, program_lines, takes_colours, without_host
from pipeline.core.processes import unexpected
from pipeline.core.tables import ENDLESS, folded

TYPED = "PACELINE_TYPED"
"""The variable in which `paceline` leaves its name."""
_UNREAD = "nobody reads this command's output any more"
_OF_A_PROGRAM = re.compile(r"(?:trial +\d+ \| )?(?:[^\s|]+ |  )\| ")  # of a rank, a step or a log
_GOES_ON = "doit status shows how it stands"


_INKS = {
    "FINISHED ": "32",
    "REPRODUCED ": "32",
    "ERROR: ": "1;31",
    "WARNING: ": "33",
    "warning: ": "33",
    "KILLED ": "36",
}


def inked(text: str, stream: TextIO) -> str:
    """The text with its first word in colour, where that says how something stands and a terminal shows colours."""
    word = next((word for word in _INKS if text.startswith(word)), None)
    if word is None or not takes_colours(stream, os.environ):
        return text
    return f"\x1b[{_INKS[word]}m{word.rstrip()}\x1b[0m{text[len(word.rstrip()) :]}"


def say(text: str, *, painted: bool = False) -> None:
    """One line (or several) on stdout, at once; what came from elsewhere moves no terminal's cursor.

    Where the command answers with JSON the line is one of stderr, and of the answer where that has no other data.

    Args:
        painted: it has colours of ours.
    """
    text = as_typed(text)
    if answers.wanted():
        answers.LINES.extend(text.splitlines())
        note(text)
        return
    print(text if painted or not sys.stdout.isatty() else inked(printable_lines(text), sys.stdout), flush=True)


def say_log(text: str) -> None:
    """Lines of a rank or a step, or values of the configuration, on stdout: commands in them are nobody's to type."""
    if answers.wanted():
        answers.LINES.extend(text.splitlines())
        return
    is_terminal, colours = sys.stdout.isatty(), takes_colours(sys.stdout, os.environ)
    print(program_lines(without_host(text), terminal=is_terminal, colours=colours), flush=True)


def note(text: str) -> None:
    """Progress and warnings, on stderr: what a program reads from stdout is the result alone."""
    text = as_typed(text)
    print(inked(printable_lines(text), sys.stderr) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def say_usual(text: str) -> None:
    """A line of the result that -v 0 leaves out."""
    if verbosity() != QUIET or is_wanted(text):
        say(text)


def note_usual(text: str) -> None:
    """Progress that -v 0 leaves out."""
    if verbosity() != QUIET or is_wanted(text):
        note(text)


def say_folded(text: str) -> None:
    """Lines for people alone, which a terminal would break in the midst of a word."""
    say(folded(as_typed(text), width()))  # a longer name may need a fold


def width() -> int:
    """Columns of the terminal that shows stdout; where a file or another command reads it, no line is folded."""
    return shutil.get_terminal_size((ENDLESS, 24)).columns if sys.stdout.isatty() else ENDLESS


def command() -> str:
    """What was typed before the verb: ``paceline``, or ``doit``, which does the same. A command that this one starts
    (Hydra's application, the training of `doit reproduce`) names its commands alike."""
    return os.environ.get(TYPED, "doit")


def as_typed(text: str) -> str:
    """A text of ours whose commands are named as this person types them: a plain doit finds no project from its
    subfolders. What doit itself is called stays (``doit's own options``), and so do lines of ranks and steps."""
    if command() == "doit":
        return text
    verbs = "|".join([*VERBS, "VERB", "help", "list", "run", "tabcompletion", r"-\w"])
    ours = re.compile(rf"\bdoit (?=(?:{verbs})\b)")
    lines = text.split("\n")
    return "\n".join(line if _OF_A_PROGRAM.match(line) else ours.sub(f"{command()} ", line) for line in lines)


def outlive_reader(error: BaseException) -> bool:
    """For ``masking.outlive``: where stdout takes no more (``| head -1``, a full disk), say so once and go on."""
    if not unexpected.is_of_output(error):
        return False
    masking.silence(1)
    why = unexpected.error_message(error) if isinstance(error, masking.OutputError) else _UNREAD
    with suppress(OSError):
        print(as_typed(f"{why}; {_GOES_ON}"), file=sys.stderr, flush=True)
    return True
