"""`doit tabcompletion`: in place of doit's own script, one that knows options, groups and fields."""

from __future__ import annotations

from typing import Any

from doit.cmd_base import Command

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
    """A command of doit's by its plug-in interface; pyproject.toml names it."""

    doc_purpose = "print the script that completes verbs, options, groups and fields"
    doc_usage = "[--shell=bash|zsh]"
    cmd_options = (
        {
            "name": "shell",
            "short": "s",
            "long": "shell",
            "type": str,
            "choices": [(name, "") for name in _SCRIPTS],
            "default": "bash",
            "help": "the shell that is to run it [default: %(default)s]",
        },
    )

    def help(self) -> str:
        """doit's page, with commands that can be copied: doit would break its lines in the middle of them."""
        return f"{super().help()}{_USES}"

    def execute(self, opt_values: dict[str, Any], pos_args: list[str]) -> int:
        print(_SCRIPTS[opt_values["shell"]], end="")
        return 0
