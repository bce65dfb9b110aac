"""Words that begin with a dash: flags of a verb, doit's own options, and those of Hydra's command line.

A verb's flags, and a run's bare key, become words: ``stop cf0848 --json`` is ``stop run=cf0848 json=1``. doit's own
options stand before the verb. With Hydra's, `doit train` becomes Hydra's command line. The rest is refused.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from doit.cmd_run import Run
from doit.cmdparse import CmdOption, CmdParse, CmdParseError

from pipeline.cli.doit_plugins import COMMANDS
from pipeline.cli.invocation import HELP_WORDS, Invocation, is_on, is_override, without_verbosity
from pipeline.cli.verbs import VERBS, Option
from pipeline.core.errors import UsageError
from pipeline.core.processes import process
from pipeline.core.specs import LAST

_KEY = re.compile(rf"[0-9a-f]{{2,32}}|{LAST}")  # of a run, the beginning of one, or the id of an MLflow run
_SHORT_FLAG = re.compile(r"-\w(\d*)")  # -f, -n 4, -n4
_LITERAL = ("torchrun", "run")  # what follows these is a script's command line


def as_words(argv: Sequence[str]) -> list[str]:
    """Translate the flags and the bare key after a verb into ``name=value``; other words stay.

    Raises UsageError: a flag without its value, a switch that is neither 1 nor 0, or two runs where one is taken.
    """
    at = next((number for number, word in enumerate(argv) if word in VERBS or word in _LITERAL), len(argv))
    if at == len(argv) or any(word in _LITERAL for word in argv):
        return [*argv]
    before, verb, rest = [*argv[:at]], argv[at], [*argv[at + 1 :]]
    becomes, words, keys = verb, list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        if named := named_by(word, verb):
            name, option = named
            value = _value(word, option, rest, verb)
            if option.stands_for and option.is_switch and not is_on({name: value}, name):
                continue
            if option.stands_for in VERBS:
                becomes = option.stands_for
            elif option.stands_for.startswith("-"):
                before += [option.stands_for] if option.is_switch else [option.stands_for, value]
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
    left_out = VERBS[verb].options.keys() - VERBS[becomes].options.keys()
    return [*before, becomes, *(word for word in words if word.partition("=")[0] not in left_out)]


def named_by(word: str, verb: str) -> tuple[str, Option] | None:
    """Return the verb's option that a flag stands for: its name and entry in the table."""
    options = VERBS[verb].options
    if word.startswith("--"):
        typed = word[2:].partition("=")[0].replace("_", "-")
        return next((item for item in options.items() if typed in item[1].flags(item[0])), None)
    if word.startswith("-"):
        return next((item for item in options.items() if _is_short(word, *item)), None)
    name = word.partition("=")[0]  # the old form, of what nothing but a flag's translation would carry out
    return (name, options[name]) if "=" in word and name in options and options[name].stands_for else None


def _is_short(word: str, name: str, option: Option) -> bool:
    short, match = option.short or (name if len(name) == 1 else ""), _SHORT_FLAG.fullmatch(word)
    return bool(short) and match is not None and word[1] == short and not (match[1] and option.is_switch)


def _value(typed: str, option: Option, rest: list[str], verb: str) -> str:
    """Return an option's value; takes it out of ``rest``, the words behind the flag, if it stands there."""
    flag, equals, value = typed.partition("=")
    if match := _SHORT_FLAG.fullmatch(typed):
        flag, equals, value = typed[:2], match[1], match[1]
    if not equals and option.is_switch:
        return option.value
    if not equals and rest and not rest[0].startswith("--"):
        value = rest.pop(0)
    if not value.strip():
        form = "1 or 0" if option.is_switch else option.value
        raise UsageError(f"{flag} of doit {verb} needs a value: {flag} {form}", hint=f"doit help {verb}")
    return value


def _names_run(word: str, verb: str) -> bool:
    """Whether a bare word after a verb is a run's key; any word is, if it may also be a sweep or a file."""
    known = VERBS[verb]
    if "run" not in known.options or known.arguments or is_override(word) or word.startswith("-"):
        return False
    return word not in VERBS and (_KEY.fullmatch(word) is not None or "|" in known.options["run"].value)


# ------------------------------------------------------------------------ flags that no verb has
_OF_HYDRA = (
    *("--cfg", "--info", "--multirun", "-m", "--resolve", "--package"),
    *("--hydra-help", "--shell-completion", "--experimental-rerun"),
)
_SHORT = {"-c": ("job", "hydra", "all"), "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
"""Hydra's --cfg and --info in short, with what may follow: doit has a -c of its own."""
_ELSEWHERE = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


def check(argv: Sequence[str], invocation: Invocation, loader_options: Sequence[dict[str, object]]) -> None:
    """Pass a training with Hydra's options on to Hydra's command line; refuse options that doit doesn't know.

    ``loader_options`` are those of doit's loader, which stand before a verb like doit's own. Raises UsageError.
    """
    for word in argv:
        name = word.partition("=")[0]
        if name in _ELSEWHERE or name in _ELSEWHERE.values():  # -cd is read by doit as its own options -c and -d
            raise UsageError(
                f"{word} is an option of Hydra's command line, and doit always takes conf/config.yaml",
                hint=f"a file of your own in conf/experiment, then experiment=NAME; or python -m pipeline {word} … "
                "(doit's own options -c -n, -c -d are written apart)",
            )
    _refuse_dashed(argv, invocation, loader_options)
    words = " ".join(shlex.quote(word) for word in invocation.overrides)
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        of_hydra = word.partition("=")[0] in _OF_HYDRA or after in _SHORT.get(word, ())
        if not of_hydra or invocation.verb is None:
            continue
        if invocation.verb == "train" and not invocation.options:
            process.replace([sys.executable, "-m", "pipeline", *(item for item in argv if item != "train")])
        options = " ".join(shlex.quote(f"{name}={value}") for name, value in invocation.options.items())
        hint = f"doit config {words}, or doit train {word} …"
        if word in ("--multirun", "-m"):
            hint = f"doit sweep {words} {options}".rstrip()
        with_options = f" beside {options}" if invocation.verb == "train" else ""
        what = f"{word} is an option of Hydra's command line, which doit {invocation.verb} doesn't take{with_options}"
        raise UsageError(what, hint=hint)
    _refuse_unknown(argv, invocation.verb, loader_options)


def _refuse_dashed(argv: Sequence[str], invocation: Invocation, loader_options: Sequence[dict[str, object]]) -> None:
    """Refuse an override written as an option: ``--epochs=3`` or ``--epochs 3``. Raises UsageError."""
    if invocation.verb is None:
        return
    known = {*_OF_HYDRA, *HELP_WORDS}
    for option in (*Run.base_options, *Run.cmd_options, *loader_options):
        known |= {f"--{option.get('long')}", f"--{option.get('inverse')}"}
    refused = dict[str, str]()
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if not name.startswith("--") or name in known or any(each.startswith(name) for each in known):
            continue
        if "=" not in word and after and after not in VERBS and not after.startswith("-") and "=" not in after:
            value = after
        refused[name] = value
    if not refused:
        return
    from pipeline.cli.words import wrong_words  # Hydra and the settings classes, for this error alone

    raise wrong_words.refused_flags(argv, refused, invocation)


def _refuse_unknown(argv: Sequence[str], verb: str | None, loader_options: Sequence[dict[str, object]]) -> None:
    """Refuse an unknown option; doit would print the list of its option objects."""
    _, words = without_verbosity([word for word in argv if not is_override(word)])
    name = next((word for word in words if word in COMMANDS), "run")
    options = (*getattr(COMMANDS[name], "base_options", ()), *loader_options, *COMMANDS[name].cmd_options)
    try:
        _, rest = CmdParse([CmdOption(item) for item in options]).parse([word for word in words if word != name])
    except CmdParseError as error:
        what = str(error).removeprefix("Error parsing Command: ").partition(" (parsing options")[0]
        raise UsageError(f"doit {name}: {' '.join(what.split())}", hint=f"doit help {name}") from error
    if verb is None and name == "run" and rest and not rest[0].startswith("-"):
        return  # behind a task of one's own stand its own options
    for word in rest:
        if word.startswith("-"):
            stands = f"doit {word} {verb or name}"
            raise UsageError(f"doit's own options come before the verb: {stands}", hint=f"doit help {name} lists them")
