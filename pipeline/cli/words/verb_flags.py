"""Translate a verb's flags, and a run's bare key: ``stop cf0848 --json`` becomes ``stop run=cf0848 json=1``.

The table of verbs lists the options. Overrides stay Hydra's words, and doit's own options stand before the verb. The
rest is left for pipeline.cli.words.flags, which refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.cli.invocation import is_on, is_override
from pipeline.cli.verbs import VERBS, Option
from pipeline.core.errors import UsageError
from pipeline.core.specs import LAST

SWITCHES = ("1", "0", "save")
"""Values that a flag stands for by itself: ``--watch``, ``--no-data``, ``--baseline``."""
_KEY = re.compile(rf"[0-9a-f]{{2,32}}|{LAST}")  # of a run, the beginning of one, or the id of an MLflow run
_SHORT = re.compile(r"-\w(\d*)")  # -f, -n 4, -n4
_LITERAL = ("torchrun", "run")  # what follows these is a script's command line


def as_words(argv: Sequence[str]) -> list[str]:
    """Translate the flags and the bare key after a verb into ``name=value``; other words stay.

    Args:
        argv: the words after ``doit``.

    Raises:
        UsageError: a flag without its value, a switch that is neither 1 nor 0, or two runs for a verb that takes one.
    """
    at = next((number for number, word in enumerate(argv) if word in VERBS or word in _LITERAL), len(argv))
    if at == len(argv) or any(word in _LITERAL for word in argv):
        return [*argv]
    before, verb, rest = [*argv[:at]], argv[at], [*argv[at + 1 :]]
    becomes, words, keys = verb, list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        if found := named_by(word, verb):
            name, option = found
            value = _value(word, option, rest, verb)
            if option.stands_for and option.value in SWITCHES and not is_on({name: value}, name):
                continue
            if option.stands_for in VERBS:
                becomes = option.stands_for
            elif option.stands_for.startswith("-"):
                before += [option.stands_for] if option.value in SWITCHES else [option.stands_for, value]
            else:
                words.append(f"{option.stands_for or name}={value}")
        elif _names_run(word, verb):
            keys.append(word)
            words.append(f"run={word}")
        else:
            words.append(word)
    if keys and len(named := [word.removeprefix("run=") for word in words if word.startswith("run=")]) > 1:
        raise UsageError(f"doit {verb} takes one run at a time, not {' and '.join(named)}", hint="doit runs")
    left_out = VERBS[verb].options.keys() - VERBS[becomes].options.keys()
    return [*before, becomes, *(word for word in words if word.partition("=")[0] not in left_out)]


def named_by(word: str, verb: str) -> tuple[str, Option] | None:
    """Return the verb's option that a flag stands for: its name and entry in the table."""
    options = VERBS[verb].options
    if word.startswith("--"):
        typed = word[2:].partition("=")[0].replace("_", "-")
        return next((item for item in options.items() if typed in _flags(*item)), None)
    if word.startswith("-"):
        return next((item for item in options.items() if _is_short(word, *item)), None)
    name = word.partition("=")[0]  # the old form, of what nothing but a flag's translation would carry out
    return (name, options[name]) if "=" in word and name in options and options[name].stands_for else None


def spelt(name: str, option: Option) -> str:
    """Return an option as help shows it: ``--watch``, ``--metric NAME,…``, ``-n N``."""
    flag = _flags(name, option)[0]
    dashed = f"-{flag}" if len(flag) == 1 else f"--{flag}"
    return dashed if option.value in SWITCHES else f"{dashed} {option.value}"


def _flags(name: str, option: Option) -> tuple[str, ...]:
    """Return the names of an option's flag without dashes, the one in help first."""
    own = name.replace(".", "-").replace("_", "-")
    if option.value == "0":
        return (f"no-{own}",)
    return (option.flag, own) if option.flag else (own,)


def _is_short(word: str, name: str, option: Option) -> bool:
    short, match = option.short or (name if len(name) == 1 else ""), _SHORT.fullmatch(word)
    return bool(short) and match is not None and word[1] == short and not (match[1] and option.value in SWITCHES)


def _value(typed: str, option: Option, rest: list[str], verb: str) -> str:
    """Return an option's value; takes it out of ``rest``, the words behind the flag, if it stands there."""
    flag, equals, value = typed.partition("=")
    if match := _SHORT.fullmatch(typed):
        flag, equals, value = typed[:2], match[1], match[1]
    if not equals and option.value in SWITCHES:
        return option.value
    if not equals and rest and not rest[0].startswith("--"):
        value = rest.pop(0)
    if not value.strip():
        form = option.value if option.value not in SWITCHES else "1 or 0"
        raise UsageError(f"{flag} of doit {verb} needs a value: {flag} {form}", hint=f"doit help {verb}")
    return value


def _names_run(word: str, verb: str) -> bool:
    """Whether a bare word after a verb is a run's key; any word is, if it may also be a sweep or a file."""
    known = VERBS[verb]
    if "run" not in known.options or known.bare or is_override(word) or word.startswith("-"):
        return False
    return word not in VERBS and (_KEY.fullmatch(word) is not None or "|" in known.options["run"].value)
