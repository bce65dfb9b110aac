"""Replacements of doit's own commands: `doit clean` is a verb, instead of the command that removes targets of tasks."""

from __future__ import annotations

import re
from typing import Any

from doit import reporter
from doit.cmd_base import Command
from doit.cmd_run import Run as RunOfDoit
from doit.dependency import DbmDB, JsonDB, SqliteDB
from doit.doit_cmd import DoitMain
from doit.exceptions import InvalidCommand
from doit.plugin import PluginEntry

from pipeline.cli import invocation
from pipeline.cli.invocation import command
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import suggestion

_REPORTERS = {
    "console": reporter.ConsoleReporter,
    "executed-only": reporter.ExecutedOnlyReporter,
    "json": reporter.JsonReporter,
    "zero": reporter.ZeroReporter,
    "error-only": reporter.ErrorOnlyReporter,
}


class Run(RunOfDoit):  # type: ignore[misc]  # doit has no type hints
    """doit's command ``run`` without its search for database and reporter plug-ins in all installed distributions.

    That search takes a twentieth of the time of a finished run. A plug-in of doit, named in pyproject.toml.
    """

    def get_backends(self) -> dict[str, Any]:
        return self._with_own("backend", {"dbm": DbmDB, "json": JsonDB, "sqlite3": SqliteDB})

    def get_reporters(self) -> dict[str, Any]:
        return self._with_own("reporter", {**_REPORTERS})

    def _with_own(self, option: str, entries: dict[str, Any]) -> dict[str, Any]:
        """Add the plug-ins in pyproject.toml, because the option replaces them all."""
        own = self.config.get(option.upper(), {})
        entries |= {name: PluginEntry(option.upper(), name, place).get() for name, place in own.items()}
        self.cmdparser[option].choices = {name: getattr(one, "desc", "") for name, one in entries.items()}
        return entries


_BASH = """\
# Tab completion of Paceline's doit for bash. Python is the one beside the doit that PATH finds first.
_paceline() {
    local doit IFS=$'\\n'
    doit=$(type -P doit) || return
    COMPREPLY=($("${doit%/*}/python" -m pipeline.cli.candidates bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
}
complete -o default -F _paceline doit paceline
"""
_ZSH = """\
# Tab completion of Paceline's doit for zsh. Python is the one beside the doit that PATH finds first.
_paceline() {
    local doit found
    doit=$(whence -p doit) || return
    found=("${(@f)$("${doit:h}/python" -m pipeline.cli.candidates zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -z ${found[1]} ]]; then _files; return; fi
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
}
compdef _paceline doit paceline
"""
_USES = """


DESCRIPTION
    for this shell:
        eval "$(doit tabcompletion)"
    for good, in bash:
        doit tabcompletion > ~/.local/share/bash-completion/completions/doit"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


class TabCompletion(Command):  # type: ignore[misc]  # doit has no type hints
    """doit's command ``tabcompletion`` with Paceline's candidates. A plug-in of doit, named in pyproject.toml."""

    doc_purpose = "print the script that completes verbs, options, groups and fields"
    doc_usage = "[--shell=bash|zsh]"
    cmd_options = (
        {"name": "shell", "short": "s", "long": "shell", "type": str, "default": "bash"}
        | {"choices": [(name, "") for name in _SCRIPTS], "help": "the shell that is to run it [default: %(default)s]"},
    )

    def help(self) -> str:
        """Return doit's page with commands that can be copied; doit would fold them."""
        return f"{super().help()}{_USES}"

    def execute(self, opt_values: dict[str, Any], pos_args: list[str]) -> int:
        print(_SCRIPTS[opt_values["shell"]], end="")
        return 0


class Clean(Run):
    """Run the task ``clean`` instead of doit's own command. A plug-in of doit, named in pyproject.toml."""

    doc_purpose = VERBS["clean"].summary
    doc_usage = "[OVERRIDE ...] [OPTION=VALUE ...]"

    def execute(self, params: Any, args: list[str]) -> Any:
        """Raises InvalidCommand: a word that is neither an override nor an option, such as the name of a task."""
        for word in args:
            if not invocation.is_override(word):
                options = [f"{name}=" for name in VERBS["clean"].options]
                if re.fullmatch(r"[0-9a-f]{6,32}|last", word):
                    raise InvalidCommand(
                        f"{command()} clean chooses runs by rules and takes no key; one run alone is deleted with its "
                        "folder: rm -r runs/KEY"
                    )
                raise InvalidCommand(f"{command()} clean takes no {word!r}; {suggestion(word, options)}")
        return super().execute(params, ["clean"])


COMMANDS = {one.get_name(): one for one in (*DoitMain.DOIT_CMDS, TabCompletion, Run, Clean)}
"""By the name that is typed."""
