"""What the person typed: the verb, the Hydra overrides in their order, and the verb's own options.

doit keeps ``key=value`` words as variables without order and takes a bare ``~key`` for a task, so the words
are read from the command line itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pipeline.cli.verbosity import taken_out
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import UsageError, nearest

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
