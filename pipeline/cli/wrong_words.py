"""Error messages about wrong words on the command line, each with what to type instead.

The loader calls ``check`` if there are flags that no verb has, and ``advice`` for a word that is no task.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from doit.cmd_run import Run
from doit.cmdparse import CmdOption, CmdParse, CmdParseError

from pipeline.cli.doit_plugins import COMMANDS
from pipeline.cli.invocation import HELP_WORDS, Invocation, is_override, without_verbosity
from pipeline.cli.verbs import VERBS
from pipeline.config.conf_files import groups
from pipeline.config.overrides.words import SCRIPT_FIELDS
from pipeline.config.unknown_key import ALIASES, RESUME_HINT, RESUME_NAMES, UnknownKeyError
from pipeline.core.errors import UsageError, nearest
from pipeline.core.processes import process

_RESUMING_COMMANDS = ("resume", "continue", "restart", "retry")
NO_RUN = "no run has such a key; doit runs lists them"
_PYTHON = ("python", "python3")
_COMMANDS_MEANT = {
    **dict.fromkeys(("delete", "remove", "rm", "gc", "purge"), "doit clean"),
    **dict.fromkeys(("ls", "list-runs", "history", "experiments", "sacct"), "doit runs"),
    **dict.fromkeys(("show", "describe", "ps", "progress"), "doit status"),
    **dict.fromkeys(("watch", "follow", "top"), "doit status --watch"),
    **dict.fromkeys(("log", "tail", "output"), "doit logs"),
    **dict.fromkeys(("test", "eval", "validate"), "doit evaluate"),
    **dict.fromkeys(("submit", "background", "nohup"), "doit train --detach"),
    **dict.fromkeys(("metrics", "scores", "best", "leaderboard", "table"), "doit compare"),
    **dict.fromkeys(("fit", "start", "launch", "execute", "repro", "exp"), "doit train"),
    **dict.fromkeys(("srun", "sbatch", "salloc"), "doit train cluster=slurm"),
    **dict.fromkeys(("mpirun", "mpiexec"), "doit train cluster=mpi"),
    **dict.fromkeys(("squeue", "sinfo"), "doit queue"),
    **dict.fromkeys(("cancel", "kill", "abort", "interrupt", "scancel"), "doit stop"),
    **dict.fromkeys(("init", "new", "create"), "paceline init my_project, in the folder that is to hold it"),
    **dict.fromkeys(("tune", "hpo", "search", "grid", "optimize", "multirun"), "doit sweep"),
    **dict.fromkeys(("graph", "dag"), "doit plan --format mermaid"),
    **dict.fromkeys(("check", "doctor", "hosts"), "doit preflight"),
    **dict.fromkeys(("download", "prepare"), "doit fetch"),
    **dict.fromkeys(("accelerate", "deepspeed", "fabric"), "doit torchrun --nproc-per-node RANKS train.py"),
    **dict.fromkeys(_PYTHON, "doit run train.py"),
    **dict.fromkeys(("dashboard", "mlflow", "web", "tensorboard"), "doit ui"),
    "server": "mlflow server, as docs/mlflow-server.md shows",
}


def advice(word: str, argv: Sequence[str], verb: str | None) -> str | None:
    """Return a sentence on what to type instead of ``word``, which is one of ``argv``; None without an idea."""
    position = next((number for number, typed in enumerate(argv) if typed == word), 0)
    before = argv[position - 1] if position else ""
    following = argv[position + 1] if position + 1 < len(argv) else ""
    # cluster.hosts=[a, b] without quotes reaches us as two words
    if before.count("[") > before.count("]") or before.count("{") > before.count("}"):
        return f"a shell splits words at blanks: {shlex.quote(before + word)}"
    if line := _without_blanks_around_equals(argv, position):
        return f"no blanks stand around =: {line}"
    if verb is None:
        return _script(word, argv[position:]) or _another_verb(word)
    if verb == "train" and (line := _script(word, argv[position:])):
        return line
    if text := _about_key(word, verb):
        return text
    if VERBS[verb].overrides and (choices := _choices(word)):
        return f"a choice is written with its group: {_instead(argv, position, 1, ' or '.join(choices))}"
    # trainer.epochs 3: the following word may be the value
    value = "" if "=" in following or following in VERBS else following
    override = _with_equals(word, value, verb)
    if override is None:
        return _another_verb(word)
    # trainer.epochs:3 and a script don't take the following word as their value
    takes_following = bool(value) and not word.endswith(".py") and ":" not in word.rstrip(":")
    return f"a field is set by =: {_instead(argv, position, 2 if takes_following else 1, override)}"


def _instead(argv: Sequence[str], position: int, count: int, word: str) -> str:
    """Return the command line with ``word``, quoted for a shell, in place of ``count`` words from ``position`` on."""
    return " ".join(filter(None, [shlex.join(["doit", *argv[:position]]), word, shlex.join(argv[position + count :])]))


def _another_verb(word: str) -> str | None:
    if word in _RESUMING_COMMANDS:
        return f"{RESUME_HINT}; doit attach takes over what still runs"
    return f"did you mean {_COMMANDS_MEANT[word]}?" if word in _COMMANDS_MEANT else None


def _without_blanks_around_equals(argv: Sequence[str], position: int) -> str | None:
    """Return the command line with ``optimizer.lr=0.1`` in place of ``optimizer.lr = 0.1``, ``lr= 0.1`` or ``lr =0.1``.

    Returns None if the words around ``position`` have no such blanks.
    """
    before, following = argv[position - 1] if position else "", argv[position + 1 : position + 3]
    if before.endswith("=") and len(before) > 1:
        return _instead(argv, position - 1, 2, shlex.quote(before + argv[position]))
    if not following or not following[0].startswith("="):
        return None
    count = 2 if following[0] == "=" else 1
    return _instead(argv, position, 1 + count, shlex.quote(argv[position] + "".join(following[:count])))


def _script(word: str, words: Sequence[str]) -> str | None:
    """Return how to start the script of ``train.py --lr 0.1`` or ``python train.py --lr 0.1``; None if it is none."""
    line = words[1:] if word in _PYTHON else words
    if not line or not line[0].endswith(".py"):
        return None
    script = shlex.join(line)
    return f"did you mean doit run {script}? with several ranks it is doit torchrun --nproc-per-node RANKS {script}"


def _about_key(word: str, verb: str) -> str | None:
    """Return advice on a run's key behind a verb that takes none, or on another word behind one that takes a key."""
    if "run" in VERBS[verb].options:
        if word in ("latest", "newest"):
            return "did you mean last?"
        return None if nearest(word, VERBS, 0.7) else NO_RUN  # a misspelt verb gets other advice
    if re.fullmatch(r"[0-9a-f]{6,32}|last", word) is None:
        return None
    return (
        f"doit {verb} takes the words that the run was started with, not its key; doit triage {word} shows those of a "
        f"run to go on with, and doit reproduce {word} repeats a finished one"
    )


def _choices(word: str) -> list[str]:
    """Return the group choices of that name: ``experiment=quickstart`` for ``quickstart`` or the path of its file."""
    file = re.fullmatch(r"(?:conf/)?(?:(\w+)/)?([\w-]+)\.ya?ml", word)
    folder, name = file.groups() if file else (None, word)
    return [f"{group.name}={name}" for group in groups() if name in group.options and folder in (None, group.name)]


# --------------------------------------------------------------------------------------------- flags
_HYDRA_OPTIONS = (
    *("--cfg", "--info", "--multirun", "-m", "--resolve", "--package"),
    *("--hydra-help", "--shell-completion", "--experimental-rerun"),
)
_HYDRA_SHORT = {
    "-c": ("job", "hydra", "all"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Hydra's short flags for --cfg and --info, with their values; with other values, -c is doit's own option."""
_HYDRA_CONFIG_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


DoitOptions = Sequence[Mapping[str, object]]
"""Options as doit's classes declare them: dicts with ``long``, ``short``, ``inverse``, …"""


def check(argv: Sequence[str], invocation: Invocation, loader_options: DoitOptions) -> None:
    """Raise UsageError for unknown flags; with Hydra's flags, restart `doit train` as Hydra's command line.

    ``loader_options`` are the options of doit's loader, which are typed before the verb.
    """
    for word in argv:
        name = word.partition("=")[0]
        if name in (*_HYDRA_CONFIG_OPTIONS, *_HYDRA_CONFIG_OPTIONS.values()):  # doit would read -cd as its -c and -d
            raise UsageError(
                f"{word} is an option of Hydra's command line, and doit always takes conf/config.yaml",
                hint=f"a file of your own in conf/experiment, then experiment=NAME; or python -m pipeline {word} … "
                "(doit's own options -c -n, -c -d are written apart)",
            )
    if invocation.verb is not None:
        _refuse_dashed_overrides(argv, invocation, loader_options)
        for word, following in zip(argv, [*argv[1:], ""], strict=True):
            if word.partition("=")[0] in _HYDRA_OPTIONS or following in _HYDRA_SHORT.get(word, ()):
                _take_hydra_option(word, argv, invocation)
    _refuse_unknown_options(argv, invocation.verb, loader_options)


def _take_hydra_option(word: str, argv: Sequence[str], invocation: Invocation) -> None:
    """Replace this process by Hydra's command line. Raises UsageError: it isn't `doit train`, or has options of it."""
    if invocation.verb == "train" and not invocation.options:
        process.replace([sys.executable, "-m", "pipeline", *(typed for typed in argv if typed != "train")])
    overrides = shlex.join(invocation.overrides)
    options = shlex.join(f"{name}={value}" for name, value in invocation.options.items())
    is_sweep = word in ("--multirun", "-m")
    hint = f"doit sweep {overrides} {options}".rstrip() if is_sweep else f"doit config {overrides}"
    with_options = f" beside {options}" if invocation.verb == "train" else ""
    message = f"{word} is an option of Hydra's command line, which doit {invocation.verb} doesn't take{with_options}"
    raise UsageError(message, hint=hint)


def _refuse_dashed_overrides(argv: Sequence[str], invocation: Invocation, loader_options: DoitOptions) -> None:
    """Refuse flags such as ``--optimizer.lr 0.1``, by which overrides are set in other tools."""
    known_flags = {*HELP_WORDS}
    for option in (*Run.base_options, *Run.cmd_options, *loader_options):
        known_flags |= {f"--{option.get('long')}", f"--{option.get('inverse')}"}
    values_by_flag = dict[str, str]()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        # doit accepts prefixes of its options; --experiment would be one of Hydra's --experimental-rerun
        if not flag.startswith("--") or flag in _HYDRA_OPTIONS or any(known.startswith(flag) for known in known_flags):
            continue
        may_be_value = following and not (following in VERBS or following.startswith("-") or "=" in following)
        if not equals and may_be_value:
            value = following
        values_by_flag[flag] = value
    if values_by_flag:
        raise refused_flags(argv, values_by_flag, invocation)


def _refuse_unknown_options(argv: Sequence[str], verb: str | None, loader_options: DoitOptions) -> None:
    """Refuse options that doit's command doesn't know, with one line; doit would print all its option objects."""
    _, words = without_verbosity([word for word in argv if not is_override(word)])
    command = next((word for word in words if word in COMMANDS), "run")
    options = (*getattr(COMMANDS[command], "base_options", ()), *loader_options, *COMMANDS[command].cmd_options)
    try:
        _, unparsed = CmdParse([CmdOption(item) for item in options]).parse([word for word in words if word != command])
    except CmdParseError as error:
        message = str(error).removeprefix("Error parsing Command: ").partition(" (parsing options")[0]
        raise UsageError(f"doit {command}: {' '.join(message.split())}", hint=f"doit help {command}") from error
    if verb is None and command == "run" and unparsed and not unparsed[0].startswith("-"):
        return  # the words behind a task of the user's dodo.py are that task's options
    for word in unparsed:
        if word.startswith("-"):
            right_order = f"doit {word} {verb or command}"
            hint = f"doit help {command} lists them"
            raise UsageError(f"doit's own options come before the verb: {right_order}", hint=hint)


def refused_flags(argv: Sequence[str], values_by_flag: Mapping[str, str], invocation: Invocation) -> UsageError:
    """Return the error about flags that a verb doesn't have: flag → its value, or '' without one."""
    assert invocation.verb is not None
    verb, first = invocation.verb, next(iter(values_by_flag))
    flags_of_verb = [option.typed(name) for name, option in VERBS[verb].options.items()]
    if first in flags_of_verb:
        return UsageError(f"the options of doit {verb} stand behind it", hint=f"doit {verb} {first}")
    if first[2:].replace("-", "_") in RESUME_NAMES:
        return UsageError(
            f"{first} is no option of doit {verb}: {RESUME_HINT}, "
            "and init.weights=KEY begins another one with its weights"
        )
    return UsageError(
        f"{first} is no option of doit {verb}, which has {', '.join(flags_of_verb) or 'none'}; "
        "overrides have no dashes",
        hint=_without_dashes(argv, values_by_flag, invocation),
    )


def _without_dashes(argv: Sequence[str], values_by_flag: Mapping[str, str], invocation: Invocation) -> str:
    """Return the command line with overrides in place of refused flags; if a flag resembles no field, `doit help`."""
    verb, words = invocation.verb or "", [*invocation.overrides]
    script = next((position for position, word in enumerate(argv) if word.endswith(".py") and "=" not in word), None)
    if script is not None and verb == "train":  # doit train train.py --lr 0.1: the flags are the script's
        return f"doit torchrun {shlex.join([*words, *argv[script:]])}"
    if script is not None and verb == "sweep":  # sweep train.py --lr 0.1,0.2 --epochs 3
        swept = {flag: value for flag, value in values_by_flag.items() if "," in value}
        sweeps = [word for flag, value in swept.items() for word in ("--sweep", f"{flag[2:]}={value}")]
        kept = [word for word in argv[script:] if word.partition("=")[0] not in {*swept, *swept.values()}]
        return f"doit run {shlex.join([*words, *sweeps, *kept])}"
    names_script = any(word.startswith(tuple(f"{field}=" for field in SCRIPT_FIELDS)) for word in words)
    options = [f"{name}={value}" for name, value in invocation.options.items()]
    replacements = list[str]()
    for flag, value in values_by_flag.items():
        if names_script:
            replacements.append(f"program.args.{flag[2:]}={value or 'true'}")
        elif override := _similar(flag[2:].replace("-", "_"), value, verb):
            replacements.append(override)
        else:
            return f"doit help {verb}"
    return " ".join([f"doit {verb}", *map(shlex.quote, [*words, *options]), *replacements])


def _with_equals(word: str, following: str, verb: str) -> str | None:
    """Return the override that was meant by a word without ``=``, or None if no field is similar.

    ``trainer.epochs=3`` for ``trainer.epochs 3`` and ``trainer.epochs:3``, ``program.script=train.py`` for a script's
    path. ``following`` is the next bare word, or ''.
    """
    if word.endswith(".py") and VERBS[verb].overrides:
        return f"program.script={shlex.quote(word)}"
    name, _, value = word.partition(":")
    value = value or following
    if not re.fullmatch(r"\w[\w.]*", name) or not (value or "." in name):
        return None  # more likely a misspelt command than a field
    return _similar(name, value, verb)


def _similar(name: str, value: str, verb: str) -> str | None:
    """Return the verb's option or the override that resembles ``name``, with ``value``; None if nothing does."""
    options = VERBS[verb].options
    if name in options:
        return f"{name}={value or 1}"
    names = {option.replace("_", ""): option for option in options}
    close = nearest(name.replace("_", ""), names, 0.8)
    if close is not None and name not in ALIASES:
        return options[names[close]].spelt(names[close])
    if not VERBS[verb].overrides:
        return None
    if file := re.fullmatch(rf"(?:conf/)?{ALIASES.get(name, name)}/([\w-]+)\.ya?ml", value):
        value = file[1]
    from pipeline.config import compose  # imports Hydra, which is needed for these messages alone

    # composing tells whether there is such a field, and which one is similar
    override = f"{name}={value or 'VALUE'}"
    try:
        compose.compose_config([override])
    except UnknownKeyError as error:
        return error.meant
    except UsageError:  # the name is right; only the value is wrong or missing
        return override
    return override
