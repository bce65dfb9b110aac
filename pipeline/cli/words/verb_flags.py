"""A verb's own options as flags, and a run by its bare key: ``stop cf0848 --json`` becomes ``stop run=cf0848 json=1``.

The table of verbs says which options there are; overrides stay Hydra's words, and doit's own options stand before the
verb. What isn't translated here is left for pipeline.cli.words.flags, which refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.cli.invocation import is_override
from pipeline.cli.verbs import VERBS, Option
from pipeline.core.errors import UsageError
from pipeline.core.specs import LAST

SWITCHES = ("1", "0", "save")
"""Values that a flag stands for by itself: ``--watch``, ``--no-data``, ``--baseline``."""
_OTHER_NAMES = {"output": ("file", "to")}
_KEY = re.compile(rf"[0-9a-f]{{3,32}}|{LAST}")  # of a run, the beginning of one, or the id of an MLflow run
_LITERAL = ("torchrun", "run")  # what follows these is a script's command line


def as_words(argv: Sequence[str]) -> list[str]:
    """Translate the flags and the bare key behind a verb into ``name=value``; everything else stays as it is.

    Args:
        argv: the words after ``doit``.

    Raises:
        UsageError: a flag that needs a value stands without one.
    """
    at = next((number for number, word in enumerate(argv) if word in VERBS or word in _LITERAL), len(argv))
    if at == len(argv) or any(word in _LITERAL for word in argv):
        return [*argv]
    before, verb, rest = [*argv[:at]], argv[at], [*argv[at + 1 :]]
    words: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--force" and VERBS[verb].is_done:
            before.append("-a")  # doit's own: do it although it is done
        elif word == "--dry-run" and verb == "train":
            verb = "plan"
        elif word == "-f" and verb == "logs":
            words.append("follow=1")
        elif word == "-n" and verb in ("step", "sweep") and rest:
            before += ["-n", rest.pop(0)]  # doit's own: so many at once
        elif word.startswith("--") and (named := named_by(word, verb)):
            words.append(_set(word, *named, rest, verb))
        elif _names_run(word, verb):
            words.append(f"run={word}")
        else:
            words.append(word)
    return [*before, verb, *words]


def named_by(flag: str, verb: str) -> tuple[str, Option] | None:
    """The verb's option that a flag stands for: its name in the table, and what the table says of it."""
    typed = flag[2:].partition("=")[0].replace("-", "_")
    options = {name.replace(".", "_"): (name, option) for name, option in VERBS[verb].options.items()}
    negated = typed.removeprefix("no_")
    for name in (typed, *_OTHER_NAMES.get(typed, ())):
        if name in options:
            return options[name]
    return options[negated] if negated in options and options[negated][1].value == "0" else None


def spelt(name: str, option: Option) -> str:
    """An option as help shows it: ``--watch``, ``--metric NAME,…``."""
    flag = name.replace(".", "-").replace("_", "-")
    if option.value == "0":
        return f"--no-{flag}"
    return f"--{flag}" if option.value in SWITCHES else f"--{flag} {option.value}"


def _set(flag: str, name: str, option: Option, rest: list[str], verb: str) -> str:
    _, equals, value = flag.partition("=")
    if equals:
        return f"{name}={value}"
    if option.value in SWITCHES:
        return f"{name}={option.value}"
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"{flag} of doit {verb} needs a value: {spelt(name, option)}", hint=f"doit help {verb}")
    return f"{name}={rest.pop(0)}"


def _names_run(word: str, verb: str) -> bool:
    """Whether a bare word behind a verb is a run's key; `doit reproduce` takes an archive's path as well."""
    known = VERBS[verb]
    if "run" not in known.options or known.takes_paths or is_override(word) or word.startswith("-"):
        return False
    return word not in VERBS and (_KEY.fullmatch(word) is not None or verb == "reproduce")
