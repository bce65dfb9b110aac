"""The translation of command lines that start a script into overrides: `doit torchrun --nproc-per-node 2 train.py --lr
0.1` and `doit run train.py`, also behind a verb (`doit plan torchrun …`). Words behind the script are its arguments.

The loader calls ``translated``, which parses a line; `script_line.py` makes overrides of it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.config.overrides.script_line import ARGUMENT, SWEEP_FORM, ScriptLine, overrides_of, replacement_notes
from pipeline.core.cache import Cache
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.core.places import HOME
from pipeline.core.processes.process import python_answer

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=")
_IMPORT_S = 120.0  # for an import of torch on a busy computer
_RENDEZVOUS = (
    *("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "local_addr"),
)
_OUTPUT = ("log_dir", "redirects", "tee", "role", "log_line_prefix_template", "local_ranks_filter")
_NOT_NEEDED = {  # option of torchrun → why it is ignored
    **dict.fromkeys(_RENDEZVOUS, "Paceline starts every node and chooses the rendezvous"),
    **dict.fromkeys(_OUTPUT, "the output of every rank is kept in runs/KEY/attempts"),
}
_OWN_FLAGS, _SWEEP_FLAGS = ("--json", "--dry-run", "--force", "--detach", "--prove"), ("--retry-failed", "--fork")
_OWN_OPTIONS, _SWEEP_OPTIONS = ("--budget", "--max-trials"), ("-n",)
"""Paceline's own flags before the script, and those of a sweep alone; the options have a value."""
_OF_PACELINE = re.compile(r"cluster(?:\.\w+)*=|tracking=|paths\.(?:runs|data)=")
"""Behind the script, a word that begins so was probably meant for Paceline."""
_TRANSLATED = ("nnodes", "nproc_per_node", "max_restarts", "module", "no_python")  # torchrun's options


def translated(
    argv: Sequence[str], folder: Path, root: Path, verbs: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return a line of `torchrun` or `run` as words for doit, and notes for the user; another line as it is.

    Args:
        folder: the folder where the command was typed.
        verbs: Paceline's verbs, one of which may precede the line.

    Raises UsageError: an option that torchrun doesn't have, or that has no counterpart.
    """
    position = next((number for number, word in enumerate(argv) if word in ("torchrun", "run")), len(argv))
    before, name, following = argv[:position], "".join(argv[position : position + 1]), argv[position + 1 :]
    # `doit run TASK` is doit's own command
    is_line = name == "torchrun" or any(word.endswith(".py") or word == "-m" for word in following)
    if not is_line and name == "run" and not before:
        _refuse_no_script(following, folder)
    if not is_line or following[:1] in (["--help"], ["-h"]) or {"help", "info", "list"} & {*before}:
        return [*argv], []
    own_flags, typed = _split_own_flags(following)
    line = _parse_torchrun(typed, root) if name == "torchrun" else _parse_run(typed)
    _refuse_misplaced(line, [name, *typed])
    _refuse_script_elsewhere(line, folder, root, [name, *typed])
    has_verb = any(word in verbs for word in before)
    start = [*before, *([] if has_verb else ["sweep" if line.sweep else "train"]), *own_flags]
    notes = [f"{', '.join(options)}: not needed, as {why}" for why, options in line.not_needed.items()]
    notes += [
        f"{word} is an argument of {line.script}, as it stands behind it; Paceline's own words stand in front of it"
        for word in line.args
        if _OF_PACELINE.match(word)
    ]
    notes += replacement_notes(line)
    return [*start, *overrides_of(line, folder, root, splits="sweep" in before)], notes


def _refuse_no_script(words: Sequence[str], folder: Path) -> None:
    """Refuse the words behind `run` that name no script: none, ``train --lr 0.1`` beside train.py, a folder.

    ``run TASK`` is doit's own command.
    """
    if set(words) <= {"--json"}:
        raise UsageError("run needs a script", hint="doit run train.py --lr 0.1; doit help run")
    first, *others = words
    script = f"{first}.py"
    if (folder / script).is_file() and any(word.startswith("--") for word in others):
        raise UsageError(
            f"{first} is no script; did you mean {script}?", hint=f"doit run {shlex.join([script, *others])}"
        )
    if (folder / first).is_dir() and ("/" in first or first in (".", "..")):
        scripts = sorted(path.name for path in (folder / first).glob("*.py") if path.name != "dodo.py")
        named = os.path.normpath(f"{first}/{scripts[0] if len(scripts) == 1 else 'SCRIPT.py'}")
        raise UsageError(f"{first} is a folder, and run needs a script", hint=f"doit run {shlex.quote(named)}")


def _split_own_flags(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Paceline's own flags before the script, and the other words."""
    script = next((n for n, word in enumerate(typed) if word.endswith(".py") or word == "-m"), len(typed))
    sweeps = any(word.partition("=")[0] == "--sweep" for word in typed[:script])
    flags = [*_OWN_FLAGS, *(_SWEEP_FLAGS if sweeps else ())]
    options = [*_OWN_OPTIONS, *(_SWEEP_OPTIONS if sweeps else ())]
    own, others = list[str](), list[str]()
    for word in typed[:script]:
        is_value = bool(own) and own[-1] in options
        is_own = is_value or word in flags or word.partition("=")[0] in options
        (own if is_own else others).append(word)
    return own, [*others, *typed[script:]]


def _refuse_misplaced(line: ScriptLine, typed: Sequence[str]) -> None:
    """Raise UsageError for `run python train.py`, `run train.py --help` and ``program.args.NAME=VALUE`` behind it."""
    if line.module or line.no_python:
        return
    start = f"doit {shlex.join(typed[: len(typed) - len(line.args) - 1])}"
    if line.script in ("python", "python3") and line.args:
        raise UsageError(f"{typed[0]} starts Python by itself", hint=f"{start} {shlex.join(line.args)}")
    if "--help" in line.args:  # else a run that has trained nothing would be recorded as finished
        raise UsageError(f"{line.script} --help trains nothing", hint=f"python {shlex.quote(line.script)} --help")
    for number, word in enumerate(line.args):
        if match := ARGUMENT.fullmatch(word):
            args = [*line.args[:number], f"--{match[1]}", match[2], *line.args[number + 1 :]]
            raise UsageError(
                f"{word} stands behind the script, which would get it as it is: overrides stand before the script",
                hint=f"{start} {shlex.join([line.script, *args])}",
            )


def _refuse_script_elsewhere(line: ScriptLine, folder: Path, root: Path, typed: Sequence[str]) -> None:
    """Refuse a script that isn't in the folder where the line was typed, but would be found in the project's."""
    if line.module or line.no_python or not line.script.endswith(".py") or (folder / line.script).exists():
        return
    if (root / line.script).is_file():
        there = os.path.relpath(root / line.script, folder)
        words = [*typed[: len(typed) - len(line.args) - 1], there, *line.args]
        raise UsageError(f"there is no {line.script} in {folder}", hint=f"doit {shlex.join(words)}")


def _parse_torchrun(typed: Sequence[str], root: Path) -> ScriptLine:
    """Parse the words behind `torchrun`. Raises UsageError: torchrun wouldn't take them, or Paceline can't."""
    if not typed:
        raise UsageError("torchrun needs a script", hint="doit torchrun --nproc-per-node 2 train.py --lr 0.1")
    answer = _ask_torch(typed, root)
    if "error" in answer:
        hint = "doit torchrun --nproc-per-node 2 train.py --lr 0.1: the script's own options stand behind it"
        if "--hostfile" in answer["error"]:
            hint = "doit torchrun cluster=pssh cluster.hostfile=FILE …"
        elif "argument --sweep" in answer["error"]:
            hint = SWEEP_FORM
        raise UsageError(f"torchrun: {answer['error']}", hint=hint)
    # what torchrun would do by these options: translated, done by Paceline anyway, or impossible
    translated: dict[str, Any] = {}
    not_needed: dict[str, list[str]] = {}
    for name, value in answer.pop("options").items():
        option = f"--{name.replace('_', '-')}"
        if name in _TRANSLATED:
            translated[name] = value
        elif name in _NOT_NEEDED:
            not_needed.setdefault(_NOT_NEEDED[name], []).append(option)
        else:
            raise UsageError(f"{option} of torchrun has no counterpart here", hint="leave it out")
    return ScriptLine(**answer, **translated, not_needed=not_needed)


def _ask_torch(typed: Sequence[str], root: Path) -> dict[str, Any]:
    """Have torch's own parser sort the words; return the answer of trainers/torchrun_options.py, which describes it."""
    program = HOME / "trainers/torchrun_options.py"
    defaults = {name: value for name, value in os.environ.items() if name.startswith("PET_")}  # torchrun reads these
    # cached, because an import of torch takes seconds
    try:
        # the first item names the form of the stored answers, so that those of another form are never found
        made_from = ["arguments counted", [*typed], defaults, metadata.version("torch"), sha256_file(program)]
        cache, entry = Cache(root, "torchrun", most=64), sha256_text(canonical_json(made_from))
        answer: dict[str, Any] | None = cache.get(entry)
        if answer is None:
            answer = python_answer(program.read_text(encoding="utf-8"), [*typed], timeout_s=_IMPORT_S)
            # the file of the cache has only the number of the script's arguments, because one may be a secret
            answer = {**answer, "args": len(answer["args"])} if "args" in answer else answer
            cache.keep({entry: answer})
    except (metadata.PackageNotFoundError, PacelineError) as error:
        raise UsageError(
            f"torch reads torchrun's options, and that doesn't work here: {error}",
            hint="doit train program.script=train.py program.args.lr=0.1 needs no torch on this computer",
        ) from error
    return {**answer, "args": [*typed[len(typed) - answer["args"] :]]} if "args" in answer else {**answer}


def _parse_run(typed: Sequence[str]) -> ScriptLine:
    """Parse ``[-m] [--cluster NAME] [--sweep NAME=VALUES] [OVERRIDE …] SCRIPT ARGUMENTS``. Raises UsageError."""
    overrides, sweep = list[str](), list[str]()
    cluster, is_module, position = None, False, 0
    while position < len(typed) and (typed[position].startswith("-") or _OVERRIDE.match(typed[position])):
        word = typed[position]
        name, equals, value = word.partition("=")
        if name in ("--cluster", "--sweep"):
            if not equals:  # the value is the next word
                position += 1
                value = typed[position] if position < len(typed) else ""
            sweep += [value] if name == "--sweep" else []
            cluster = value if name == "--cluster" else cluster
        elif word == "-m":
            is_module = True
        elif word.startswith("-"):
            raise UsageError(
                f"run has no option {word}; it has -m, --cluster NAME, --sweep NAME=VALUES, "
                f"{', '.join([*_OWN_FLAGS, *_OWN_OPTIONS])}",
                hint="doit run train.py --lr 0.1: the script's own options stand behind it",
            )
        else:
            overrides.append(word)
        position += 1
    if position >= len(typed):
        raise UsageError("run needs a script", hint="paceline run train.py --lr 0.1")
    return ScriptLine(
        script=typed[position], args=typed[position + 1 :], overrides=overrides, cluster=cluster, sweep=sweep,
        nproc_per_node="1", module=is_module, with_torchrun=False,
    )  # fmt: skip
