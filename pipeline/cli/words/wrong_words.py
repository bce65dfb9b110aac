"""Suggestions for a word that is no command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.verbs import VERBS
from pipeline.cli.words import flags
from pipeline.config.groups import groups

_GOES_ON = "the same doit train goes on where its run was; doit attach takes over what still runs"
_OF_AN_OLD_RUN = ("resume", "continue", "restart", "retry")
_MEANT = {
    **dict.fromkeys(("delete", "remove", "rm", "gc", "purge"), "doit clean"),
    **dict.fromkeys(("ls", "list-runs", "history", "experiments"), "doit runs"),
    **dict.fromkeys(("show", "describe", "ps", "progress"), "doit status"),
    **dict.fromkeys(("watch", "follow", "top"), "doit status --watch"),
    **dict.fromkeys(("log", "tail", "output"), "doit logs"),
    **dict.fromkeys(("test", "eval", "validate"), "doit evaluate"),
    **dict.fromkeys(("fit", "start", "launch", "execute"), "doit train"),
    **dict.fromkeys(("cancel", "kill", "abort", "interrupt"), "doit stop"),
    **dict.fromkeys(("tune", "hpo", "search", "grid", "optimize", "multirun"), "doit sweep"),
    **dict.fromkeys(("diff",), "doit compare"),
    **dict.fromkeys(("graph",), "doit dag"),
    **dict.fromkeys(("check", "doctor", "hosts"), "doit preflight"),
    **dict.fromkeys(("download", "prepare"), "doit fetch"),
    **dict.fromkeys(("register", "deploy"), "doit publish"),
    **dict.fromkeys(("accelerate", "deepspeed", "fabric"), "doit torchrun --nproc-per-node RANKS train.py"),
    **dict.fromkeys(("python", "python3"), "doit run train.py"),
    **dict.fromkeys(("dashboard", "mlflow", "web"), "doit ui"),
}


def meant(word: str, argv: Sequence[str], verb: str | None) -> str | None:
    """Return what to type instead of ``word``, as a sentence; None if nothing is known.

    Args:
        argv: the words after ``doit``, as they were typed.
        verb: the verb among them, if there is one.
    """
    at = next((number for number, typed in enumerate(argv) if typed == word), 0)
    before = argv[at - 1] if at else ""
    if before.count("[") > before.count("]") or before.count("{") > before.count("}"):
        whole = before + word
        return f"a shell splits words at blanks: {shlex.quote(whole)}"
    if "=" in before and (path := _with_blanks(argv, at)) is not None:
        field = before.partition("=")[0]
        whole = f"{field}='{path}'"
        return f'a shell splits words at blanks: "{whole}"'
    if verb is None:
        return _another_verb(word)
    if VERBS[verb].composes and (chosen := _option(word)):
        return f"a choice is written with its group: doit {verb} {' or '.join(chosen)}"
    after = argv[at + 1] if at + 1 < len(argv) and "=" not in argv[at + 1] else ""
    set_by = flags.without_equals(word, "" if after in VERBS else after, verb)
    if set_by is None:
        return _another_verb(word)
    return f"a field is set by =: doit {verb} {set_by}"


def _another_verb(word: str) -> str | None:
    if word in _OF_AN_OLD_RUN:
        return _GOES_ON
    return f"did you mean {_MEANT[word]}?" if word in _MEANT else None


def _with_blanks(argv: Sequence[str], at: int) -> str | None:
    """Return the existing path with blanks that the shell has split: the value before ``at`` with later words."""
    start = argv[at - 1].partition("=")[2]
    for end in range(at + 1, len(argv) + 1):
        path = " ".join([start, *argv[at:end]])
        if Path(path).exists():
            return path
    return None


def _option(word: str) -> list[str]:
    """Return ``experiment=quickstart`` for ``quickstart``, and for the path of its file."""
    file = re.fullmatch(r"(?:conf/)?(?:(\w+)/)?([\w-]+)\.ya?ml", word)
    of_group, name = file.groups() if file else (None, word)
    return [f"{group.name}={name}" for group in groups() if name in group.options and of_group in (None, group.name)]
