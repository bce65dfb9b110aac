"""The shapes that dodo.py's tasks have.

Whether a task is up to date is asked of the run folder, never of doit's database.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doit import get_initial_workdir
from doit.exceptions import TaskError, TaskFailed

from pipeline.cli import clone
from pipeline.cli.clone import ROOT
from pipeline.cli.loader import Loader, leave
from pipeline.cli.verbs import VERBS
from pipeline.core import unexpected
from pipeline.core.errors import PacelineError, UsageError

Task = dict[str, Any]
_ANSWERS = ("config", "logs", "plan", "report", "runs", "status", "why")  # their output is all that is wanted


def always(verb: str, *, after: Sequence[str] = ()) -> Task:
    """A task that runs whenever it is asked for."""
    _need_loader()
    return {
        "actions": [_action(verb)],
        "task_dep": _dependencies(after),
        "verbosity": 2,
        "meta": {"answers": verb in _ANSWERS},
        "io": {"capture": False},  # doit would keep every line of a training in memory
        "title": lambda task: _title(task.name),
        **({"doc": VERBS[verb].summary} if verb in VERBS else {}),
    }


def until(verb: str, is_done: str, *, after: Sequence[str] = ()) -> Task:
    """A task that runs until the function ``is_done`` of ``pipeline.cli.commands`` says that it is finished."""
    return {**always(verb, after=after), "uptodate": [lambda: bool(getattr(_commands(), is_done)())]}


def _need_loader() -> None:
    """doit's own loader takes overrides for tasks and sets no root.

    doit reads pyproject.toml of the folder where it is started alone: in a subfolder of the project the same command
    starts anew in the project's folder.
    """
    if not Loader.in_charge:
        started_in = Path(get_initial_workdir())
        project = clone.enclosing(started_in)
        if project not in (None, started_in) and not any(word.startswith(("-f", "--file")) for word in sys.argv):
            from pipeline.core import process

            os.chdir(project)
            process.replace([sys.executable, "-m", "doit", *sys.argv[1:]])
        what = f"doit was started where no pyproject.toml names Paceline's loader; {ROOT} has it"
        leave(UsageError(what, hint=f"cd {shlex.quote(str(ROOT))}, then the same command without -k or -f"))


def _commands() -> Any:
    """Imported when a task runs: `doit list` needs nothing of it."""
    from pipeline.cli import commands

    return commands


def _action(verb: str) -> Callable[[], Any]:
    def run() -> Any:
        try:
            getattr(_commands(), verb)()
        except UsageError as error:  # of what can only be checked by the verb: a run's key, a port
            leave(error)
        except PacelineError as error:
            return TaskFailed(str(error))
        except Exception as error:  # doit would print its traceback
            if unexpected.nobody_reads(error):
                leave(error)
            return TaskError(unexpected.told(error))
        return None

    return run


def _title(name: str) -> str:
    return str(_commands().title(name.lstrip("_")))


def _dependencies(after: Sequence[str]) -> list[str]:
    """None where ``run=KEY`` names a run that exists already."""
    if not after:
        return []
    import sys

    from pipeline.cli import invocation

    return [] if "run" in invocation.parse(sys.argv[1:]).options else list(after)
