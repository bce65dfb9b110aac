"""Paceline's plug-ins for doit, which pyproject.toml names: the commands ``run`` and ``clean``, reporter, database.

The loader is in ``loader.py``. doit has no type hints, so its tasks and options are ``Any`` here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from doit import reporter
from doit.cmd_run import Run as RunOfDoit
from doit.dependency import DbmDB, JsonDB, SqliteDB
from doit.doit_cmd import DoitMain
from doit.exceptions import InvalidCommand, TaskError, TaskFailed
from doit.plugin import PluginEntry

from pipeline.cli import invocation
from pipeline.cli.invocation import QUIET, verbosity
from pipeline.cli.output import as_typed, coloured, command
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import suggestion
from pipeline.core.printable import printable_lines

_REPORTERS = {
    "console": reporter.ConsoleReporter,
    "executed-only": reporter.ExecutedOnlyReporter,
    "json": reporter.JsonReporter,
    "zero": reporter.ZeroReporter,
    "error-only": reporter.ErrorOnlyReporter,
}


class Run(RunOfDoit):  # type: ignore[misc]  # doit has no type hints
    """doit's command ``run``, which executes tasks, with database and reporter plug-ins from pyproject.toml alone."""

    # doit also searches all installed distributions, which is 5 % of the time of a command whose run is finished

    def get_backends(self) -> dict[str, Any]:
        return self._with_plugins("backend", {"dbm": DbmDB, "json": JsonDB, "sqlite3": SqliteDB})

    def get_reporters(self) -> dict[str, Any]:
        return self._with_plugins("reporter", _REPORTERS)

    def _with_plugins(self, option: str, classes_of_doit: Mapping[str, type]) -> dict[str, Any]:
        category = option.upper()
        locations = self.config.get(category, {})  # name → module:class
        plugins = {name: PluginEntry(category, name, location).get() for name, location in locations.items()}
        classes = {**classes_of_doit, **plugins}
        self.cmdparser[option].choices = {name: getattr(cls, "desc", "") for name, cls in classes.items()}
        return classes


class Clean(Run):
    """Run the task ``clean`` instead of doit's own command, which removes targets of tasks."""

    doc_purpose = VERBS["clean"].summary
    doc_usage = "[OVERRIDE ...] [OPTION=VALUE ...]"

    def execute(self, params: Any, args: list[str]) -> Any:
        """Raises InvalidCommand: a word that is neither an override nor an option, such as the name of a task."""
        for word in args:
            # doit would take a bare word for a task whose targets are to be removed
            if not invocation.is_override(word):
                options = [f"{name}=" for name in VERBS["clean"].options]
                if re.fullmatch(r"[0-9a-f]{6,32}|last", word):
                    raise InvalidCommand(
                        f"{command()} clean chooses runs by rules and takes no key; one run alone is deleted with its "
                        "folder: rm -r runs/KEY"
                    )
                raise InvalidCommand(f"{command()} clean takes no {word!r}; {suggestion(word, options)}")
        return super().execute(params, ["clean"])


COMMANDS = {command.get_name(): command for command in (*DoitMain.DOIT_CMDS, Run, Clean)}
"""doit's command classes, with Paceline's two, by the name that is typed."""


# ---------------------------------------------------------------------------------- reporter and database
class MemoryDB(JsonDB):  # type: ignore[misc]  # doit has no type hints
    """doit's database (its documentation, "Plugins: backend") without a file: it reads and writes nothing."""

    def _load(self) -> dict[str, Any]:
        return {}

    def dump(self) -> None:
        """Do nothing at doit's end."""


class Reporter(reporter.ConsoleReporter):  # type: ignore[misc]  # doit has no type hints
    """Prints what doit does, on stderr, because stdout holds the answers of verbs.

    Unlike doit's console reporter it prints words instead of marks, and of a failed task the message alone.
    """

    desc = "console output, errors as one message"

    def __init__(self, outstream: Any, options: Any) -> None:
        """Write to stderr instead of stdout; ``outstream`` is another file if ``-o FILE`` was typed."""
        super().__init__(sys.stderr if outstream is sys.__stdout__ else outstream, options)

    def _write_failure(self, result: dict[str, Any], write_exception: bool = True) -> None:
        error = result["exception"]
        # verbs raise no exception: their wrapper (project._action) returns TaskFailed or TaskError with a message
        if isinstance(error, TaskFailed | TaskError) and not error.traceback:
            self.outstream.flush()
            if not error.message:  # the verb has printed its error itself
                return
            self.write(coloured(f"ERROR: {as_typed(printable_lines(error.message))}\n", self.outstream))
        else:
            super()._write_failure(result, write_exception)

    def execute_task(self, task: Any) -> None:
        """Print a line for each task that does something; none for verbs that only answer, such as why and plan."""
        if not (task.meta or {}).get("answers"):
            self._print_title(task, "")
        self.outstream.flush()

    def skip_uptodate(self, task: Any) -> None:
        self._print_title(task, ": done already")

    def skip_ignore(self, task: Any) -> None:
        self._print_title(task, ": left out, as doit ignore asked for")

    def complete_run(self) -> None:
        """Omit doit's second report of each failure, because no output is captured."""
        self.failures: list[Any] = []
        super().complete_run()

    def _print_title(self, task: Any, outcome: str) -> None:
        is_hidden = not task.actions or task.name.startswith("_") or verbosity() == QUIET
        if not is_hidden and (title := task.title()):
            self.write(f"{title}{outcome}\n")
