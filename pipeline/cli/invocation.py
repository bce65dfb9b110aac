"""Parse the command line (sys.argv): the verb, Hydra overrides in their order, its own options; where it was typed.

A verb's flags and a run's bare key become words first: ``stop cf0848 --json`` is ``stop run=cf0848 json=1``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from doit import get_initial_workdir

from pipeline.cli.verbs import ON, VERBS, Option
from pipeline.core.errors import UsageError, nearest
from pipeline.core.places import REPRODUCTIONS
from pipeline.core.specs import LAST

QUIET, USUAL, VERBOSE = range(3)
_VERBOSITY_WITH_LEVEL = re.compile(r"(?:-v|--verbosity=)([012])")
_ALWAYS_EXECUTE = re.compile(r"-[csk]*a[acsk]*|--always-execute")  # short options may be joined, as in -sa
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
HELP_WORDS = frozenset({"-h", "--help", "help", "info", "--version"})
"""The words that ask for help. ``pipeline.cli.help`` is imported only if the command line has one of them."""
_KEY = re.compile(rf"[0-9a-f]{{2,32}}|{LAST}")  # of a run, the beginning of one, or the id of an MLflow run
_SHORT_FLAG = re.compile(r"-\w(\d*)")  # -f, -n 4, -n4
_STARTS_SCRIPT = ("torchrun", "run")  # what follows these is a script's command line


class Invocation(NamedTuple):
    """A parsed command line."""

    verb: str | None  # None for doit's own commands and for a bare `doit`
    overrides: tuple[str, ...] = ()  # Hydra's words, as typed
    options: Mapping[str, str] = MappingProxyType({})  # the verb's own
    repeats: bool = False  # a finished run is repeated (doit's own option -a)
    arguments: tuple[str, ...] = ()  # the bare words after a verb that takes files, keys or names

    @property
    def runs_dir_words(self) -> tuple[str, ...]:
        """The overrides with the folder of runs, for commands that are shown; without that of `doit reproduce`."""
        return tuple(
            word for word in self.overrides if word.startswith("paths.runs=") and f"/{REPRODUCTIONS}/" not in word
        )

    @property
    def names_run(self) -> bool:
        """Whether a key, or an override that is part of a run, says which run is meant."""
        return "run" in self.options or not all(word.startswith("paths.") for word in self.overrides)

    def is_on(self, option: str) -> bool:
        """Whether the switch is on; off by default."""
        return self.options.get(option, "0").lower() in ON

    def numbers(self, *options: str) -> dict[str, int]:
        """Return the typed ones of these options as numbers: name → whole number from 1."""
        return {name: int(self.options[name]) for name in options if name in self.options}

    @property
    def budget_s(self) -> float | None:
        """The seconds of ``--budget 1h30m``; None without it. Raises UsageError: its value is no duration."""
        typed = self.options.get("budget")
        if typed is None:
            return None
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", typed)
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
        if "".join(map("".join, parts)) != typed or not seconds:
            raise UsageError(f"--budget {typed} is no duration", hint="--budget 90s, 30m, 1h30m or 2d")
        return seconds


def parse(argv: Sequence[str]) -> Invocation:
    """Parse the words after ``doit``.

    Raises UsageError: an empty word, an override that the verb doesn't take, or a wrong value of an option.
    """
    for position, word in enumerate(argv, start=1):
        if not word.strip():
            raise UsageError(
                f"argument {position} is empty ({word!r}); is a shell variable unset? "
                "overrides look like optimizer.lr=0.1"
            )
    _, words = without_verbosity(argv)
    bare_words = [word for word in words if not is_override(word) and not word.startswith("-")]
    settings = [word for word in argv if is_override(word)]
    verb = next((word for word in bare_words if word in VERBS), None)
    if verb is None:
        return Invocation(verb=None, overrides=tuple(settings))
    known = VERBS[verb].options
    options = {name: word.partition("=")[2] for word in settings if (name := _option_name(word, verb)) in known}
    for name, value in options.items():
        known[name].check(name, value)
    overrides = tuple(word for word in settings if _option_name(word, verb) not in known)
    if overrides and not VERBS[verb].overrides:
        name, _, value = overrides[0].partition("=")
        similar = nearest(name, known)
        question = f"did you mean {similar}={value}? " if similar else ""
        raise UsageError(f"doit {verb} takes no {name!r}; {question}valid: {', '.join(known)}")
    return Invocation(
        verb=verb,
        overrides=overrides,
        options=options,
        repeats=any(map(_ALWAYS_EXECUTE.fullmatch, argv)),
        arguments=tuple(bare_words[bare_words.index(verb) + 1 :]) if VERBS[verb].arguments else (),
    )


def _option_name(word: str, verb: str) -> str:
    """Return the name that a word sets, without the verb as a prefix: ``deep`` for ``preflight.deep=1``."""
    return word.partition("=")[0].removeprefix(f"{verb}.")


def is_override(word: str) -> bool:
    """Whether a word is ``key=value``, ``+key=value`` or ``~key``, which doit must not take for a task or an option."""
    return word.startswith("~") or ("=" in word and not word.startswith(("-", "/", "./", "../")))


# ------------------------------------------------------------------- options of doit itself, which Paceline reads too
def verbosity() -> int:
    """Return the verbosity: 0 shows warnings, errors and the result, 1 (default) also progress, 2 also torchrun's."""
    level, _ = without_verbosity(sys.argv[1:])
    return USUAL if level is None else level


def without_verbosity(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the last verbosity among the words (None without one), and the words without verbosity options.

    An option with an unknown level stays among the words; it is refused later.
    """
    level, other_words, remaining = None, list[str](), [*words]
    while remaining:
        word = remaining.pop(0)
        if attached := _VERBOSITY_WITH_LEVEL.fullmatch(word):
            level = int(attached[1])
        elif word in ("-v", "--verbosity") and remaining and remaining[0] in ("0", "1", "2"):
            level = int(remaining.pop(0))
        else:
            other_words.append(word)
    return level, other_words


def process_count() -> int:
    """Return how many steps may run concurrently: doit's own option -n, default 1."""
    match = re.search(r"(?:^|\0)(?:-n|--process)[\0=]?(\d+)(?:\0|$)", "\0".join(sys.argv[1:]))
    return max(1, int(match[1])) if match else 1


# ------------------------------------------------------------------- flags and a bare key
def flags_as_words(argv: Sequence[str]) -> list[str]:
    """Translate the flags and the bare key after a verb into ``name=value``; other words stay.

    Raises UsageError: a flag without its value, a switch that is neither 1 nor 0, or two runs where one is taken.
    """
    is_verb = [word in VERBS for word in argv]
    if True not in is_verb or any(word in _STARTS_SCRIPT for word in argv):
        return [*argv]
    position = is_verb.index(True)
    doit_options, verb, remaining = [*argv[:position]], argv[position], [*argv[position + 1 :]]
    verb_to_run, words, keys = verb, list[str](), list[str]()
    while remaining:
        word = remaining.pop(0)
        if found := option_of(word, verb):
            name, option = found
            value = _value(word, option, remaining, verb)
            if option.stands_for:
                option.check(name, value)
            if option.stands_for and option.is_switch and value.lower() not in ON:
                continue
            if option.stands_for in VERBS:
                verb_to_run = option.stands_for
            elif option.stands_for.startswith("-"):
                doit_options += [option.stands_for] if option.is_switch else [option.stands_for, value]
            else:
                words.append(f"{option.stands_for or name}={value}")
        elif _names_run(word, verb):
            keys.append(word)
            words.append(f"run={word}")
        else:
            words.append(word)
    runs = [word.removeprefix("run=") for word in words if word.startswith("run=")]
    if keys and len(runs) > 1:
        raise UsageError(f"doit {verb} takes one run at a time, not {' and '.join(runs)}", hint="doit runs")
    unknown_there = VERBS[verb].options.keys() - VERBS[verb_to_run].options.keys()
    return [*doit_options, verb_to_run, *(word for word in words if word.partition("=")[0] not in unknown_there)]


def option_of(word: str, verb: str) -> tuple[str, Option] | None:
    """Return the verb's option that a flag names, or ``name=value`` of one that stands for something else."""
    options = VERBS[verb].options
    if word.startswith("--"):
        flag = word[2:].partition("=")[0].replace("_", "-")
        names = (name for name, option in options.items() if flag in option.flags(name))
    elif word.startswith("-"):
        names = (name for name, option in options.items() if _is_short(word, name, option))
    else:
        names = (name for name in options if word.startswith(f"{name}=") and options[name].stands_for)
    name = next(names, None)
    return None if name is None else (name, options[name])


def _is_short(word: str, name: str, option: Option) -> bool:
    short, match = option.short or (name if len(name) == 1 else ""), _SHORT_FLAG.fullmatch(word)
    return bool(short) and match is not None and word[1] == short and not (match[1] and option.is_switch)


def _value(typed: str, option: Option, following: list[str], verb: str) -> str:
    """Return an option's value. If it stands behind the flag, remove it from ``following``."""
    flag, equals, value = typed.partition("=")
    if match := _SHORT_FLAG.fullmatch(typed):
        flag, equals, value = typed[:2], match[1], match[1]
    if not equals and option.is_switch:
        return option.value
    if not equals and following and not following[0].startswith("--"):
        value = following.pop(0)
    if not value.strip():
        form = "1 or 0" if option.is_switch else option.value
        raise UsageError(f"{flag} of doit {verb} needs a value: {flag} {form}", hint=f"doit help {verb}")
    return value


def _names_run(word: str, verb: str) -> bool:
    """Whether a bare word after a verb is a run's key; any word is, if it may also be a sweep or a file."""
    entry = VERBS[verb]
    if "run" not in entry.options or entry.arguments or is_override(word) or word.startswith("-"):
        return False
    return word not in VERBS and (_KEY.fullmatch(word) is not None or "|" in entry.options["run"].value)


# ------------------------------------------------------------------------------- where it was typed
STARTED_IN = "PACELINE_STARTED_IN"
"""The variable in which a command that is started anew finds the folder where it was typed."""

_remembered: list[str] = []


def typed_in() -> Path:
    """Return the folder where the command was typed, which doit leaves for that of the dodo.py."""
    folders = [os.environ.get(STARTED_IN), *_remembered, get_initial_workdir()]
    return Path(next(filter(None, folders), None) or os.getcwd())  # noqa: PTH109


def remember_typed_in() -> None:
    """Remember that the command was typed in this folder, before it is left for the project's."""
    _remembered[:] = [os.getcwd()]  # noqa: PTH109


def leave_for(folder: Path) -> None:
    """Go to another folder, in which the command is restarted; its variable keeps the one where it was typed."""
    os.environ[STARTED_IN] = str(typed_in())
    os.chdir(folder)
