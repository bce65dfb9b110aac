"""doit's own option -v, which says how much a training shows. It may stand behind the verb too."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

QUIET, USUAL, VERBOSE = range(3)

_ATTACHED = re.compile(r"(?:-v|--verbosity=)([012])")
_ALONE = ("-v", "--verbosity")
_TROUBLE = re.compile(r"\b(?:warning|error): ", re.IGNORECASE)


def verbosity() -> int:
    """0 shows warnings, errors and the end alone, 1 (without it) what is usual, 2 also what torchrun itself says."""
    told, _ = taken_out(sys.argv[1:])
    return USUAL if told is None else told


def is_wanted(text: str) -> bool:
    """Whether a line is shown with -v 0."""
    return _TROUBLE.search(text) is not None


def taken_out(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The level that the words tell (the last one counts; None: none), and the words without it. A level that isn't
    there is left in place, for who refuses it."""
    level, rest, left = None, list[str](), [*words]
    while left:
        word = left.pop(0)
        attached = _ATTACHED.fullmatch(word)
        if attached:
            level = int(attached[1])
        elif word in _ALONE and left and left[0] in ("0", "1", "2"):
            level = int(left.pop(0))
        else:
            rest.append(word)
    return level, rest
