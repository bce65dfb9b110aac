"""The parsed command line: the verb, Hydra's overrides in order, the verb's options; and the folder where it was typed.

``flags_as_words`` first turns flags and a run's bare key into words, ``stop cf0848 --json`` into ``stop run=cf0848
json=1``; then ``parse`` reads these.
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
HELP_WORDS = frozenset({"-h", "--help", "help", "info", "--version", "-V", "version"})
"""The words that ask for help. ``pipeline.cli.help`` is imported only if the command line has one of them."""
_KEY = re.compile(rf"[0-9a-f]{{2,32}}|{LAST}")  # a run's key, the beginning of it, or the id of an MLflow run
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
        """The overrides ``paths.runs=…``, which a command that is shown to the user needs too."""
        return tuple(  # `doit reproduce` sets a temporary folder, which no user types
            word for word in self.overrides if word.startswith("paths.runs=") and f"/{REPRODUCTIONS}/" not in word
        )

    @property
    def names_run(self) -> bool:
        """Whether the words say which run is meant: by a key, or by an override other than a path."""
        return "run" in self.options or not all(word.startswith("paths.") for word in self.overrides)

    def is_on(self, option: str) -> bool:
        """Whether the switch is on; off by default."""
        return self.options.get(option, "0").lower() in ON

    def numbers(self, *options: str) -> dict[str, int]:
        """Return those of the ``options`` that were typed: name → whole number from 1."""
        return {name: int(self.options[name]) for name in options if name in self.options}

    @property
    def budget_s(self) -> float | None:
        """The seconds of ``--budget 1h30m``; None without it. Raises UsageError: its value is no duration."""
        typed = self.options.get("budget")
        if typed is None:
            return None
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", typed)  # pairs (number, unit)
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
        if "".join(map("".join, parts)) != typed or not seconds:  # findall skips what doesn't match
            raise UsageError(f"--budget {typed} is no duration", hint="--budget 90s, 30m, 1h30m or 2d")
        return seconds


def parse(argv: Sequence[str]) -> Invocation:
    """Parse the words after ``doit``. Raises UsageError: an empty or wrong word, or a wrong value of an option."""
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
    # a word sets an option of the verb if there is one of its name; all other settings are overrides
    options_of_verb = VERBS[verb].options
    options, overrides = dict[str, str](), list[str]()
    for word in settings:
        if (name := _option_name(word, verb)) in options_of_verb:
            options[name] = word.partition("=")[2]
        else:
            overrides.append(word)
    for name, value in options.items():
        options_of_verb[name].check(name, value)
    if overrides and not VERBS[verb].overrides:
        name, _, value = overrides[0].partition("=")
        similar = nearest(name, options_of_verb)
        question = f"did you mean {similar}={value}? " if similar else ""
        raise UsageError(f"doit {verb} takes no {name!r}; {question}valid: {', '.join(options_of_verb)}")
    return Invocation(
        verb=verb,
        overrides=tuple(overrides),
        options=options,
        repeats=any(map(_ALWAYS_EXECUTE.fullmatch, argv)),
        arguments=tuple(bare_words[bare_words.index(verb) + 1 :]) if VERBS[verb].arguments else (),
    )


def _option_name(word: str, verb: str) -> str:
    """Return the name that a word sets, without the verb as a prefix: ``deep`` for ``preflight.deep=1``."""
    return word.partition("=")[0].removeprefix(f"{verb}.")


def is_override(word: str) -> bool:
    """Whether a word is an override (``key=value``, ``+key=value``, ``~key``) and no task, option or path."""
    return word.startswith("~") or ("=" in word and not word.startswith(("-", "/", "./", "../")))


# ------------------------------------------------------------------- options of doit itself, which Paceline reads too
def verbosity() -> int:
    """Return the verbosity: 0 shows warnings, errors and the result, 1 (default) also progress, 2 also torchrun's."""
    level, _ = without_verbosity(sys.argv[1:])
    return USUAL if level is None else level


def without_verbosity(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the last verbosity among the words (None without one), and the words without verbosity options."""
    level, other_words, remaining = None, list[str](), [*words]
    while remaining:
        word = remaining.pop(0)
        if attached := _VERBOSITY_WITH_LEVEL.fullmatch(word):
            level = int(attached[1])
        elif word in ("-v", "--verbosity") and remaining and remaining[0] in ("0", "1", "2"):
            level = int(remaining.pop(0))
        else:  # also -v with a wrong level, which is refused later
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
    # the flags behind `torchrun` and `run` are torchrun's or the script's (config/overrides/torchrun_line.py)
    if True not in is_verb or any(word in _STARTS_SCRIPT for word in argv):
        return [*argv]
    position = is_verb.index(True)
    doit_options, verb, remaining = [*argv[:position]], argv[position], [*argv[position + 1 :]]
    verb_to_run, words, keys = verb, list[str](), list[str]()
    while remaining:
        word = remaining.pop(0)
        if named_option := option_of(word, verb):
            name, option = named_option
            value = _take_value(word, option, remaining, verb)
            if option.stands_for:  # parse won't see this option, so its value is checked here
                option.check(name, value)
                if option.is_switch and value.lower() not in ON:
                    continue
            if option.stands_for in VERBS:  # train --dry-run is plan
                verb_to_run = option.stands_for
            elif option.stands_for.startswith("-"):  # train --force is doit -a train
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
    # plan, in place of train --dry-run, has no --budget
    options_to_drop = VERBS[verb].options.keys() - VERBS[verb_to_run].options.keys()
    return [*doit_options, verb_to_run, *(word for word in words if word.partition("=")[0] not in options_to_drop)]


def option_of(word: str, verb: str) -> tuple[str, Option] | None:
    """Return the verb's option that a word sets, with its name; None if it sets none that has to be translated.

    The word is a flag, or ``name=value`` if the option stands for something else (``n=4`` of `doit step`).
    """
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
    """Whether a word is the option's flag of one letter: ``-f``, ``-n4``; a switch has no number behind it."""
    letter, match = option.short or (name if len(name) == 1 else ""), _SHORT_FLAG.fullmatch(word)
    return bool(letter) and match is not None and word[1] == letter and not (match[1] and option.is_switch)


def _take_value(typed: str, option: Option, following: list[str], verb: str) -> str:
    """Return the value of a typed flag. If it is the next word, remove that from ``following``."""
    flag, equals, value = typed.partition("=")
    if match := _SHORT_FLAG.fullmatch(typed):  # -n4 has its value without an equals sign
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
    """Whether a bare word after a verb names a run."""
    entry = VERBS[verb]
    if "run" not in entry.options or entry.arguments or is_override(word) or word.startswith("-"):
        return False
    takes_any_name = "|" in entry.options["run"].value  # KEY|SWEEP, KEY|ID|FILE: not a key alone
    return word not in VERBS and (_KEY.fullmatch(word) is not None or takes_any_name)


# ------------------------------------------------------------------------------- where it was typed
STARTED_IN = "PACELINE_STARTED_IN"
"""The environment variable that keeps the folder where a command was typed while it restarts itself elsewhere."""

_typed_in: list[str] = []  # the folder that ``remember_typed_in`` saw, if it was called


def typed_in() -> Path:
    """Return the folder where the command was typed; doit itself changes to the folder of dodo.py."""
    folders = [os.environ.get(STARTED_IN), *_typed_in, get_initial_workdir()]
    return Path(next(filter(None, folders), None) or os.getcwd())  # noqa: PTH109


def remember_typed_in() -> None:
    """Remember the current folder as the one where the command was typed, before a change to the project's folder."""
    _typed_in[:] = [os.getcwd()]  # noqa: PTH109


def change_folder(folder: Path) -> None:
    """Change to a folder in which the command will restart itself; ``STARTED_IN`` keeps where it was typed."""
    os.environ[STARTED_IN] = str(typed_in())
    os.chdir(folder)
