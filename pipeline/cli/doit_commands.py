"""doit's own commands as they are here: `doit clean` is a verb, in place of the one that removes targets of tasks."""

from __future__ import annotations

from typing import Any

from doit.doit_cmd import DoitMain
from doit.exceptions import InvalidCommand

from pipeline.cli import invocation
from pipeline.cli.output import command
from pipeline.cli.run_command import Run
from pipeline.cli.tabcompletion import TabCompletion
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import suggestion


class Clean(Run):
    """Runs the task of that name. By doit's plug-in interface (in pyproject.toml) it replaces doit's own command."""

    doc_purpose = VERBS["clean"].summary
    doc_usage = "[OVERRIDE ...] [OPTION=VALUE ...]"

    def execute(self, params: Any, args: list[str]) -> Any:
        """Raises InvalidCommand: a word that is neither an override nor an option, such as the name of a task."""
        for word in args:
            if not invocation.is_override(word):
                options = [f"{name}=" for name in VERBS["clean"].options]
                raise InvalidCommand(f"{command()} clean takes no {word!r}; {suggestion(word, options)}")
        return super().execute(params, ["clean"])


COMMANDS = {one.get_name(): one for one in (*DoitMain.DOIT_CMDS, TabCompletion, Run, Clean)}
"""By the name that is typed."""
