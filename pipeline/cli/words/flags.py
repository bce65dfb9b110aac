"""Words that begin with a dash: flags of a verb, doit's own options, and those of Hydra's command line.

A verb's flags, and a run's bare key, become words: ``stop cf0848 --json`` is ``stop run=cf0848 json=1``. doit's own
options stand before the verb. With Hydra's, `doit train` becomes Hydra's command line. The rest is refused.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
_STARTS_SCRIPT = ("torchrun", "run")  # what follows these is a script's command line


class TypedOption(NamedTuple):
    """An option of a verb as it stands in the table."""

    name: str
    option: Option


def as_words(argv: Sequence[str]) -> list[str]:
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
            if option.stands_for and option.is_switch and not is_on({name: value}, name):
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


def option_of(word: str, verb: str) -> TypedOption | None:
    """Return the verb's option that a flag names, or ``name=value`` if the option stands for something else."""
    options = VERBS[verb].options
    if word.startswith("--"):
        flag = word[2:].partition("=")[0].replace("_", "-")
        names = (name for name, option in options.items() if flag in option.flags(name))
    elif word.startswith("-"):
        names = (name for name, option in options.items() if _is_short(word, name, option))
    else:
        names = (name for name in options if word.startswith(f"{name}=") and options[name].stands_for)
    name = next(names, None)
    return None if name is None else TypedOption(name, options[name])


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


# ------------------------------------------------------------------------ flags that no verb has
_OF_HYDRA = (
    *("--cfg", "--info", "--multirun", "-m", "--resolve", "--package"),
    *("--hydra-help", "--shell-completion", "--experimental-rerun"),
)
_SHORT = {"-c": ("job", "hydra", "all"), "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
"""Hydra's --cfg and --info in short, with what may follow: doit has a -c of its own."""
_ELSEWHERE = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


DoitOptions = Sequence[Mapping[str, object]]
"""Options as doit's classes declare them: dicts with ``long``, ``short``, ``inverse``, …"""


def check(argv: Sequence[str], invocation: Invocation, loader_options: DoitOptions) -> None:
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
    if invocation.verb is not None:
        _refuse_dashed_overrides(argv, invocation, loader_options)
        for word, following in zip(argv, [*argv[1:], ""], strict=True):
            if word.partition("=")[0] in _OF_HYDRA or following in _SHORT.get(word, ()):
                _take_hydra_option(word, argv, invocation)
    _refuse_unknown_options(argv, invocation.verb, loader_options)


def _take_hydra_option(word: str, argv: Sequence[str], invocation: Invocation) -> None:
    """Become Hydra's command line, if it is a training without options of its own. Raises UsageError: it isn't."""
    if invocation.verb == "train" and not invocation.options:
        process.replace([sys.executable, "-m", "pipeline", *(typed for typed in argv if typed != "train")])
    overrides = shlex.join(invocation.overrides)
    options = shlex.join(f"{name}={value}" for name, value in invocation.options.items())
    hint = f"doit config {overrides}, or doit train {word} …"
    if word in ("--multirun", "-m"):
        hint = f"doit sweep {overrides} {options}".rstrip()
    with_options = f" beside {options}" if invocation.verb == "train" else ""
    message = f"{word} is an option of Hydra's command line, which doit {invocation.verb} doesn't take{with_options}"
    raise UsageError(message, hint=hint)


def _refuse_dashed_overrides(argv: Sequence[str], invocation: Invocation, loader_options: DoitOptions) -> None:
    """Refuse an override written as an option: ``--epochs=3`` or ``--epochs 3``. Raises UsageError."""
    known = {*_OF_HYDRA, *HELP_WORDS}
    for option in (*Run.base_options, *Run.cmd_options, *loader_options):
        known |= {f"--{option.get('long')}", f"--{option.get('inverse')}"}
    values_by_flag = dict[str, str]()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or any(option.startswith(flag) for option in known):  # doit takes shortened ones
            continue
        if not equals and following and not (following in VERBS or following.startswith("-") or "=" in following):
            value = following
        values_by_flag[flag] = value
    if values_by_flag:
        from pipeline.cli.words import wrong_words  # Hydra and the settings classes, for this error alone

        raise wrong_words.refused_flags(argv, values_by_flag, invocation)


def _refuse_unknown_options(argv: Sequence[str], verb: str | None, loader_options: DoitOptions) -> None:
    """Refuse an unknown option; doit would print the list of its option objects."""
    _, words = without_verbosity([word for word in argv if not is_override(word)])
    command = next((word for word in words if word in COMMANDS), "run")
    options = (*getattr(COMMANDS[command], "base_options", ()), *loader_options, *COMMANDS[command].cmd_options)
    try:
        _, unparsed = CmdParse([CmdOption(item) for item in options]).parse([word for word in words if word != command])
    except CmdParseError as error:
        message = str(error).removeprefix("Error parsing Command: ").partition(" (parsing options")[0]
        raise UsageError(f"doit {command}: {' '.join(message.split())}", hint=f"doit help {command}") from error
    if verb is None and command == "run" and unparsed and not unparsed[0].startswith("-"):
        return  # behind a task of one's own stand its own options
    for word in unparsed:
        if word.startswith("-"):
            right_order = f"doit {word} {verb or command}"
            hint = f"doit help {command} lists them"
            raise UsageError(f"doit's own options come before the verb: {right_order}", hint=hint)
