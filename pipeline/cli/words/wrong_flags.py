"""Errors about overrides that are written as options or without their equals sign, with what was meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from pipeline.cli.invocation import Invocation
from pipeline.cli.verbs import VERBS
from pipeline.config import compose
from pipeline.config.errors import unknown_key
from pipeline.config.overrides.words import NAME_A_SCRIPT
from pipeline.core.errors import UsageError, nearest


def refused_flags(argv: Sequence[str], refused: Mapping[str, str], invocation: Invocation) -> UsageError:
    """Return the error about flags that a verb doesn't have. ``refused``: flag → value or ''."""
    assert invocation.verb is not None
    verb, first = invocation.verb, next(iter(refused))
    own = [option.typed(name) for name, option in VERBS[verb].options.items()]
    if first in own:
        return UsageError(f"the options of doit {verb} stand behind it", hint=f"doit {verb} {first}")
    if first[2:].replace("-", "_") in unknown_key.RESUMES:
        return UsageError(
            f"{first} is no option of doit {verb}: {unknown_key.GOES_ON}, and init.weights=KEY begins another one with "
            "its weights"
        )
    what = f"{first} is no option of doit {verb}, which has {', '.join(own) or 'none'}; overrides have no dashes"
    return UsageError(what, hint=_without_dashes(argv, refused, invocation))


def _without_dashes(argv: Sequence[str], refused: Mapping[str, str], invocation: Invocation) -> str:
    """Return the whole command line with overrides in place of the refused flags; help if one is like no field."""
    verb, words = invocation.verb or "", [*invocation.overrides]
    script = next((at for at, word in enumerate(argv) if word.endswith(".py") and "=" not in word), None)
    if script is not None and verb == "train":
        return f"doit torchrun {shlex.join([*words, *argv[script:]])}"
    of_script = any(word.startswith(tuple(f"{field}=" for field in NAME_A_SCRIPT)) for word in words)
    typed = [f"{name}={value}" for name, value in invocation.options.items()]
    meant = list[str]()
    for flag, value in refused.items():
        name = flag[2:].replace("-", "_")
        word = f"program.args.{flag[2:]}={value or 'true'}" if of_script else _meant(name, value, verb)
        if word is None:
            return f"doit help {verb}"
        meant.append(word)
    return " ".join([f"doit {verb}", *map(shlex.quote, [*words, *typed]), *meant])


def without_equals(word: str, after: str, verb: str) -> str | None:
    """Return the override that was meant, or None if no field is similar. ``after`` is the next bare word, or ''.

    ``trainer.epochs=3`` for ``trainer.epochs 3`` or ``trainer.epochs:3``, ``program.script=train.py`` for the path.
    """
    if word.endswith(".py") and VERBS[verb].overrides:
        return f"program.script={shlex.quote(word)}"
    name, _, value = word.partition(":")
    value = value or after
    if not re.fullmatch(r"\w[\w.]*", name) or not (value or "." in name):
        return None  # a command with a slip, as a rule
    return _meant(name, value, verb)


def _meant(name: str, value: str, verb: str) -> str | None:
    """Return the verb's option of that name, or the similar override; None if nothing is similar."""
    if name in VERBS[verb].options:
        return f"{name}={value or 1}"
    plain = {option.replace("_", ""): option for option in VERBS[verb].options}
    if (close := nearest(name.replace("_", ""), plain, 0.8)) is not None and name not in unknown_key.MEANT:
        return VERBS[verb].options[plain[close]].spelt(plain[close])
    if not VERBS[verb].overrides:
        return None
    if file := re.fullmatch(rf"(?:conf/)?{unknown_key.MEANT.get(name, name)}/([\w-]+)\.ya?ml", value):
        value = file[1]
    word = f"{name}={value or 'VALUE'}"
    try:
        compose.compose_config([word])
    except unknown_key.UnknownKeyError as error:
        return error.meant
    except UsageError:  # the name is right, and so the value is wrong or missing
        return word
    return word
