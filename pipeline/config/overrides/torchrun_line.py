"""Parse command lines of other tools, to translate them into overrides: `torchrun …`, and `run` for `python …`.

    torchrun --nproc-per-node 2 train.py --lr 0.1
    train cluster.nproc_per_node=2 program.script=train.py program.args.lr=0.1

torchrun's own options are parsed by torch (``trainers/torchrun_options.py``, in a separate process). Words after the
script are passed to it unchanged. A verb may precede the line: `doit plan torchrun …`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.config.overrides.script_overrides import ARGUMENT, ScriptLine, overrides_of
from pipeline.core.cache import Cache
from pipeline.core.errors import PacelineError, UsageError, nearest
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
_NOT_NEEDED = {
    **dict.fromkeys(_RENDEZVOUS, "Paceline starts every node and chooses the rendezvous"),
    **dict.fromkeys(_OUTPUT, "the output of every rank is kept in runs/KEY/attempts"),
}
_OWN_FLAGS = ("--json", "--dry-run", "--force", "--detach", "--prove")
_OWN_OPTIONS = ("--budget", "--max-trials")
"""Paceline's own too, each with a value."""
_TRANSLATED = ("nnodes", "nproc_per_node", "max_restarts", "module", "no_python")


def translated(
    argv: Sequence[str], folder: Path, root: Path, verbs: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Translate a line of `torchrun` or `run`; return the words for doit, and notes for the user.

    Other command lines are returned unchanged.

    Args:
        folder: the folder where the command was typed.
        verbs: Paceline's verbs, one of which may precede the line.

    Raises UsageError: an option that torchrun doesn't have, or that has no counterpart.
    """
    if argv[:1] == ["run"] and set(argv[1:]) <= {"--json"}:
        raise UsageError("run needs a script", hint="doit run train.py --lr 0.1; doit help run")
    at = next((at for at, word in enumerate(argv) if word in ("torchrun", "run")), len(argv))
    name, behind = "".join(argv[at : at + 1]), argv[at + 1 :]
    is_line = name == "torchrun" or any(word.endswith(".py") or word == "-m" for word in behind)  # doit has a run too
    if not is_line or behind[:1] in (["--help"], ["-h"]) or {"help", "info", "list"} & {*argv[:at]}:
        return [*argv], []
    own, typed = _own_flags(behind)
    line = _of_torchrun(typed, root) if name == "torchrun" else _of_run(typed)
    _refuse_misplaced(line, [name, *typed])
    has_verb = any(word in verbs for word in argv[:at])
    begin = [*argv[:at], *([] if has_verb else ["sweep" if line.sweep else "train"]), *own]
    notes = [f"{', '.join(options)}: not needed, as {why}" for why, options in line.not_needed.items()]
    return [*begin, *overrides_of(line, folder, root, splits="sweep" in argv[:at])], notes


def _own_flags(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take Paceline's own flags out of the words before the script; return them and the other words."""
    script = next((at for at, word in enumerate(typed) if word.endswith(".py") or word == "-m"), len(typed))
    own, others = list[str](), list[str]()
    for word in typed[:script]:
        is_value = bool(own) and own[-1] in _OWN_OPTIONS
        is_own = is_value or word in _OWN_FLAGS or word.partition("=")[0] in _OWN_OPTIONS
        (own if is_own else others).append(word)
    return own, [*others, *typed[script:]]


def _refuse_misplaced(line: ScriptLine, typed: Sequence[str]) -> None:
    """Refuse python as the script, and overrides behind the script."""
    if line.module or line.no_python:
        return
    begin = f"doit {shlex.join(typed[: len(typed) - len(line.args) - 1])}"
    if line.script in ("python", "python3") and line.args:
        raise UsageError(f"{typed[0]} starts Python by itself", hint=f"{begin} {shlex.join(line.args)}")
    for at, word in enumerate(line.args):
        if match := ARGUMENT.fullmatch(word):
            args = [*line.args[:at], f"--{match[1]}", match[2], *line.args[at + 1 :]]
            raise UsageError(
                f"{word} stands behind the script, which would get it as it is: overrides stand before the script",
                hint=f"{begin} {shlex.join([line.script, *args])}",
            )


def _of_torchrun(typed: Sequence[str], root: Path) -> ScriptLine:
    if not typed:
        raise UsageError("torchrun needs a script", hint="doit torchrun --nproc-per-node 2 train.py --lr 0.1")
    answer = _torchs_answer(typed, root)
    if "error" in answer:
        raise UsageError(f"torchrun: {answer['error']}", hint=_instead(typed, answer["error"]))
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


def _instead(typed: Sequence[str], error: str) -> str:
    """Return the line with options that torchrun lacks behind the script, whose own they are as a rule."""
    script = next((at for at, word in enumerate(typed) if word.endswith(".py")), None)
    refused = error.removeprefix("unrecognized arguments: ").split()
    if "--hostfile" in refused:
        return "doit torchrun cluster=pssh cluster.hostfile=FILE …"
    if script is None and "training_script" in error:
        return "doit torchrun --nproc-per-node 2 train.py --lr 0.1"
    if script is None or refused == error.split():
        return "torchrun --help"
    before, of_script, previous = list[str](), list[str](), ""
    for word in typed[:script]:
        is_value = previous in refused and "=" not in previous and not word.startswith("-")
        (of_script if word in refused or is_value else before).append(word)
        previous = word
    return f"doit torchrun {shlex.join([*before, *typed[script:], *of_script])}"


def _torchs_answer(typed: Sequence[str], root: Path) -> dict[str, Any]:
    """Return the words as torch's parser sorts them: the answer of trainers/torchrun_options.py, where it is described.

    Answers are cached, because an import of torch takes seconds.
    """
    program = HOME / "trainers/torchrun_options.py"
    defaults = {name: value for name, value in os.environ.items() if name.startswith("PET_")}  # torchrun reads them
    try:
        made_from = ["arguments counted", [*typed], defaults, metadata.version("torch"), sha256_file(program)]
        cache, entry = Cache(root, "torchrun", most=64), sha256_text(canonical_json(made_from))
        answer: dict[str, Any] | None = cache.get(entry)
        if answer is None:
            answer = python_answer(program.read_text(encoding="utf-8"), [*typed], timeout_s=_IMPORT_S)
            # only the number of the script's arguments, as one may be a secret
            answer = {**answer, "args": len(answer["args"])} if "args" in answer else answer
            cache.keep({entry: answer})
    except (metadata.PackageNotFoundError, PacelineError) as error:
        raise UsageError(
            f"torch reads torchrun's options, and that doesn't work here: {error}",
            hint="doit train program.script=train.py program.args.lr=0.1 needs no torch on this computer",
        ) from error
    return {**answer, "args": [*typed[len(typed) - answer["args"] :]]} if "args" in answer else {**answer}


def _of_run(typed: Sequence[str]) -> ScriptLine:
    """Parse ``[-m] [--cluster NAME] [--sweep NAME=VALUES] [OVERRIDE …] SCRIPT ARGUMENTS``. Raises UsageError."""
    overrides, sweep = list[str](), list[str]()
    cluster, is_module, at = None, False, 0
    while at < len(typed) and (typed[at].startswith("-") or _OVERRIDE.match(typed[at])):
        word = typed[at]
        name, equals, value = word.partition("=")
        if name in ("--cluster", "--sweep"):
            if not equals:
                at += 1
                value = typed[at] if at < len(typed) else ""
            sweep += [value] if name == "--sweep" else []
            cluster = value if name == "--cluster" else cluster
        elif word == "-m":
            is_module = True
        elif word.startswith("-"):
            raise _unknown_option(typed, at)
        else:
            overrides.append(word)
        at += 1
    if at >= len(typed):
        raise UsageError("run needs a script", hint="paceline run train.py --lr 0.1")
    return ScriptLine(
        script=typed[at], args=typed[at + 1 :], overrides=overrides, cluster=cluster, sweep=sweep, nproc_per_node="1",
        module=is_module, with_torchrun=False,
    )  # fmt: skip


def _unknown_option(typed: Sequence[str], at: int) -> UsageError:
    """Return the error for an option of `run` that there isn't, with the option that was probably meant.

    An option like no other is the script's as a rule, so the hint has it and what follows it behind the script.
    """
    name, equals, value = typed[at].partition("=")
    script = next((number for number, word in enumerate(typed) if word.endswith(".py")), None)
    words: Sequence[str] | None = None
    if meant := nearest(name, ("--cluster", "--sweep", *_OWN_FLAGS, *_OWN_OPTIONS), likeness=0.75):
        words = [*typed[:at], f"{meant}{equals}{value}", *typed[at + 1 :]]
    elif script is not None:
        words = [*typed[:at], *typed[script:], *typed[at:script]]
    return UsageError(
        f"run has no option {typed[at]}; it has -m, --cluster NAME, --sweep NAME=VALUES, "
        f"{', '.join([*_OWN_FLAGS, *_OWN_OPTIONS])}",
        hint=f"doit run {shlex.join(words)}" if words else None,
    )
