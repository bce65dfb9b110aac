"""doit's reporter plug-in: a line per task, in words, and errors unchanged and unfolded.

All on stderr, because stdout holds the answers of verbs.
"""

from __future__ import annotations

import sys
from typing import Any

from doit.dependency import JsonDB
from doit.exceptions import TaskError, TaskFailed
from doit.reporter import ConsoleReporter

from pipeline.cli.invocation import QUIET, as_typed, verbosity
from pipeline.cli.output import inked
from pipeline.core.printable import printable_lines


class MemoryDB(JsonDB):  # type: ignore[misc]  # doit has no type hints
    """doit's database (its documentation, "Plugins: backend") without a file: it reads and writes nothing."""

    def _load(self) -> dict[str, Any]:
        return {}

    def dump(self) -> None:
        """Do nothing at doit's end."""


class Reporter(ConsoleReporter):  # type: ignore[misc]  # doit has no type hints
    """doit's console reporter with words instead of marks; a failed task shows its message alone."""

    desc = "console output, errors as one message"

    def __init__(self, outstream: Any, options: Any) -> None:
        """doit took stdout when it was imported; ``-o FILE`` stays that file."""
        super().__init__(sys.stderr if outstream is sys.__stdout__ else outstream, options)

    def _write_failure(self, result: dict[str, Any], write_exception: bool = True) -> None:
        error = result["exception"]
        if isinstance(error, TaskFailed | TaskError) and not error.traceback:  # the verbs' own
            self.outstream.flush()
            if not error.message:  # what was found stands in the verb's own output
                return
            self.write(inked(f"ERROR: {as_typed(printable_lines(error.message))}\n", self.outstream))
        else:
            super()._write_failure(result, write_exception)

    def execute_task(self, task: Any) -> None:
        """Print a line for each task that does something; questions are answered without one."""
        if not (task.meta or {}).get("answers"):
            self._report(task, "")
        self.outstream.flush()

    def skip_uptodate(self, task: Any) -> None:
        self._report(task, ": done already")

    def skip_ignore(self, task: Any) -> None:
        self._report(task, ": left out, as doit ignore asked for")

    def complete_run(self) -> None:
        """Omit doit's second report of each failure, because no output is captured."""
        self.failures: list[Any] = []
        super().complete_run()

    def _report(self, task: Any, standing: str) -> None:
        """Report a task that has actions, a title and a name without a leading _; none with -v 0."""
        if task.actions and not task.name.startswith("_") and verbosity() != QUIET and (title := task.title()):
            self.write(f"{title}{standing}\n")
