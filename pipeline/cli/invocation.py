"""What the person typed: the verb, the Hydra overrides in their order, and the verb's own options.

doit keeps ``key=value`` words as variables without order and takes a bare ``~key`` for a task, so the words
are read from the command line itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pipeline.cli.verbs import VERBS
from pipeline.core.errors import UsageError, nearest

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


def is_on(options: Mapping[str, str], name: str) -> bool:
    """A switch: ``name=1``, off where it isn't given. Raises UsageError: neither yes nor no."""
    value = options.get(name, "0")
    if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise UsageError(f"{name}={value} must be 1 or 0")
    return value.lower() in ("1", "true", "yes")


def at_once() -> int:
    """How many steps may run side by side: doit's own option -n, 1 without it."""
    told = re.search(r"(?:^|\0)(?:-n|--process)[\0=]?(\d+)(?:\0|$)", "\0".join(sys.argv[1:]))
    return max(1, int(told[1])) if told else 1


_AGAIN = re.compile(r"-[csk]*a[acsk]*|--always-execute")  # short ones may stand together
HELP_WORDS = frozenset({"-h", "--help", "help", "info", "--version"})
"""A command line without any of these asks for no help (``pipeline.cli.help``, which only help imports)."""


class Invocation(NamedTuple):
    """A command line, sorted. ``verb`` is None for doit's own commands and for a bare `doit`.

    ``again``: doit's own option -a, to do again what is finished. ``paths`` are the bare words behind a verb that takes
    files and folders.
    """

    verb: str | None
    overrides: tuple[str, ...] = ()
    options: Mapping[str, str] = MappingProxyType({})
    again: bool = False
    paths: tuple[str, ...] = ()


def is_override(word: str) -> bool:
    """``key=value``, ``+key=value``, ``~key``: whatever doit must not take for a task or an option."""
    return word.startswith("~") or ("=" in word and not word.startswith(("-", "/", "./", "../")))


def typed_runs_dir(argv: Sequence[str]) -> str:
    """The folder of runs as far as it can be told before the words are composed."""
    told = [word.partition("=")[2].strip("'\"") for word in argv if word.startswith("paths.runs=")]
    return os.path.expanduser(told[-1]) if told else "runs"  # noqa: PTH111  (Path's raises where no such user is)


def parse(argv: Sequence[str]) -> Invocation:
    """Sort the words after ``doit``.

    Raises:
        UsageError: an empty word (an unset shell variable, as a rule), an override that the verb doesn't take.
    """
    for position, word in enumerate(argv, start=1):
        if not word.strip():
            raise UsageError(
                f"argument {position} is empty ({word!r}); is a shell variable unset? "
                "overrides look like optimizer.lr=0.1"
            )
    _, words = taken_out(argv)
    words = [word for word in words if not is_override(word) and not word.startswith("-")]
    verb = next((word for word in words if word in VERBS), None)
    given = [word for word in argv if is_override(word)]
    if verb is None:
        return Invocation(verb=None, overrides=tuple(given))
    own = VERBS[verb].options
    options = {name: word.partition("=")[2] for word in given if (name := _option(word, verb)) in own}
    for name, value in options.items():
        if not value.isprintable():
            raise UsageError(f"{name}={value!r} holds what can't be printed; is a shell variable wrong?")
    overrides = tuple(word for word in given if _option(word, verb) not in own)
    if overrides and not VERBS[verb].composes:
        name, _, value = overrides[0].partition("=")
        close = nearest(name, own)
        meant = f"did you mean {close}={value}? " if close else ""
        raise UsageError(f"doit {verb} takes no {name!r}; {meant}valid: {', '.join(own)}")
    paths = tuple(words[words.index(verb) + 1 :]) if VERBS[verb].takes_paths else ()
    again = any(map(_AGAIN.fullmatch, argv))
    return Invocation(verb=verb, overrides=overrides, options=options, again=again, paths=paths)


def _option(word: str, verb: str) -> str:
    """The name that a word sets, without the verb's own in front: ``preflight.deep=1`` is ``deep=1``."""
    return word.partition("=")[0].removeprefix(f"{verb}.")
