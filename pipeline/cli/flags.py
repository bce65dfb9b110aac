"""Words that begin with a dash: doit's own options, and those of Hydra's command line, which `doit train` takes too."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from doit.cmdparse import CmdOption, CmdParse, CmdParseError

from pipeline.cli.doit_commands import COMMANDS
from pipeline.cli.invocation import Invocation, is_override
from pipeline.cli.verbosity import taken_out
from pipeline.core import process
from pipeline.core.errors import UsageError

_OF_HYDRA = ("--cfg", "--info", "--multirun", "-m", "--resolve", "--package", "--hydra-help", "--shell-completion")
_ELSEWHERE = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


def check(argv: Sequence[str], asked: Invocation, loader_options: Sequence[dict[str, object]]) -> None:
    """Hand a training with options of Hydra's over to Hydra's command line; refuse what doit doesn't know.

    Args:
        argv: the words after ``doit``.
        loader_options: the options of doit's loader, which stand before a verb like the others.

    Raises:
        UsageError: an option that doit or the verb doesn't take, or one that stands after the verb.
    """
    _refuse_elsewhere(argv)
    words = " ".join(shlex.quote(word) for word in asked.overrides)
    for word in argv:
        if word.partition("=")[0] not in _OF_HYDRA or asked.verb is None:
            continue
        if asked.verb == "train":
            process.replace([sys.executable, "-m", "pipeline", *(item for item in argv if item != "train")])
        hint = f"doit sweep {words}" if word in ("--multirun", "-m") else f"doit config {words}, or doit train {word} …"
        raise UsageError(
            f"{word} is an option of Hydra's command line, which doit {asked.verb} doesn't take", hint=hint
        )
    _refuse_unknown(argv, asked.verb, loader_options)


def _refuse_elsewhere(argv: Sequence[str]) -> None:
    """doit would read -cd as two of its own options, -c and -d."""
    for word in argv:
        name = word.partition("=")[0]
        if name in _ELSEWHERE or name in _ELSEWHERE.values():
            raise UsageError(
                f"{word} is an option of Hydra's command line, and doit always takes conf/config.yaml",
                hint=f"a file of your own in conf/experiment, then experiment=NAME; or python -m pipeline {word} … "
                "(doit's own options -c -n, -c -d are written apart)",
            )


def _refuse_unknown(argv: Sequence[str], verb: str | None, loader_options: Sequence[dict[str, object]]) -> None:
    """doit would print the list of its option objects."""
    _, words = taken_out([word for word in argv if not is_override(word)])
    name = next((word for word in words if word in COMMANDS), "run")
    options = (*getattr(COMMANDS[name], "base_options", ()), *loader_options, *COMMANDS[name].cmd_options)
    try:
        _, rest = CmdParse([CmdOption(item) for item in options]).parse([word for word in words if word != name])
    except CmdParseError as error:
        what = str(error).removeprefix("Error parsing Command: ").partition(" (parsing options")[0]
        raise UsageError(f"doit {name}: {' '.join(what.split())}", hint=f"doit help {name}") from error
    for word in rest:
        if word.startswith("-"):
            stands = f"doit {word} {verb or name}"
            raise UsageError(f"doit's own options stand before the verb: {stands}", hint=f"doit help {name} lists them")
