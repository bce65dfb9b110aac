"""The name by which the user calls this command, ``doit`` or ``paceline``, in Paceline's own text."""

from __future__ import annotations

import os
import re

from pipeline.cli.verbs import VERBS

TYPED = "PACELINE_TYPED"
"""The variable in which `paceline` leaves its name."""
_OF_A_PROGRAM = re.compile(r"(?:trial +\d+ \| )?(?:[^\s|]+ |  )\| ")  # of a rank, a step or a log


def command() -> str:
    """Return the command that was typed before the verb: ``paceline``, or ``doit``, which does the same.

    Commands started by this one (Hydra's application, the training of `doit reproduce`) use the same name.
    """
    return os.environ.get(TYPED, "doit")


def as_typed(text: str) -> str:
    """Rename commands in Paceline's own text as the user types them: in subfolders a plain doit finds no project.

    Names of doit itself stay (``doit's own options``), and so do lines of ranks and steps.
    """
    if command() == "doit":
        return text
    verbs = "|".join([*VERBS, "VERB", "help", "list", "run", "tabcompletion", r"-\w"])
    ours = re.compile(rf"\bdoit (?=(?:{verbs})\b)")
    lines = text.split("\n")
    return "\n".join(line if _OF_A_PROGRAM.match(line) else ours.sub(f"{command()} ", line) for line in lines)
