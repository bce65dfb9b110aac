"""What a project's dodo.py imports: a task for each verb of ``pipeline.cli.verbs``, and steps of one's own.

The run folder decides whether a task is up to date, never doit's database.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from doit import get_initial_workdir
from doit.exceptions import TaskError, TaskFailed

from pipeline.cli import invocation
from pipeline.cli.loader import Exit, Loader, leave
from pipeline.cli.output import finish_answer, refuse, say
from pipeline.cli.verbs import VERBS, Verb
from pipeline.core import places
from pipeline.core.errors import Killed, PacelineError, UsageError
from pipeline.core.places import ROOT
from pipeline.core.processes import process, unexpected

__all__ = ["DOIT_CONFIG", "task_verbs"]

DOIT_CONFIG = {"default_tasks": ["_overview"], "action_string_formatting": "new"}
_MOST_SUMMARY = 240  # characters

Task = dict[str, Any]
"""A task as doit takes it from dodo.py: actions, task_dep, uptodate, …"""


def task_verbs() -> Iterator[Task]:
    """Return a task for each verb, and an overview, because a bare `doit` starts nothing."""
    yield _overview()
    for name, verb in VERBS.items():
        yield _verb_task(name, verb)


def _verb_task(name: str, verb: Verb) -> Task:
    _need_loader()
    task = {
        **_task(name, lambda: _finish_answer(name, _call(f"commands.{verb.module}.{name}"))),
        "title": lambda task: _call("finished.title", task.name),
        "task_dep": [] if "run" in invocation.parse(sys.argv[1:]).options else list(verb.after),
        "meta": {"answers": verb.answers},
        "doc": verb.summary,
    }
    if verb.is_done:
        task["uptodate"] = [lambda: bool(_finish_answer(name, _call(f"finished.{verb.is_done}")))]
    return task


def _finish_answer(name: str, result: Any) -> Any:
    """Return ``result`` of a verb's function; if the verb was typed and is done, print its JSON answer."""
    is_due = result is not False and name == invocation.parse(sys.argv[1:]).verb
    if is_due:
        finish_answer()
    return result


def step(name: str, **fields: Any) -> None:
    """Declare a step in dodo.py instead of conf/step/NAME.yaml, with the same fields; ``function`` may be
    a Python function instead of its name.
    """
    from pipeline.steps import declare  # late import: a project without steps loads nothing of them

    declare(name, **fields)


def of_step(name: str) -> Task:
    """Return a task ``step-NAME`` that makes a step, for tasks of your own: ``task_dep: ["step-clean"]``.

    Its folder comes by ``getargs: {"out": ("step-clean", "out")}``.
    """
    _need_loader()

    def make() -> dict[str, str]:
        return {"out": str(_call("commands.steps.make", name))}

    return {**_task(f"step-{name}", make), "doc": f"make step {name} and what it needs"}


def _overview() -> Task:
    def show() -> None:
        from pipeline.cli import help as pages  # imported late: for a bare `doit` alone

        say(pages.overview())

    return _task("_overview", show)


def _call(function: str, *args: object) -> Any:
    """Call a function of ``pipeline.cli`` (``commands.train.train``) with the session; both are imported only now."""
    from pipeline.cli.session import session  # imported late: composing isn't for `doit list` and help

    module, _, name = function.rpartition(".")
    return getattr(import_module(f"pipeline.cli.{module}"), name)(session(), *args)


def _task(name: str, do: Callable[[], Any]) -> Task:
    return {
        "basename": name,
        "actions": [_action(do)],
        "verbosity": 2,
        "io": {"capture": False},  # doit would keep every line of a training in memory
    }


def _need_loader() -> None:
    """Make sure that doit uses Paceline's loader; without it, doit would take overrides for tasks.

    doit finds it in pyproject.toml, which it reads only in the folder where it starts: a command that was typed in a
    subfolder is restarted in the project's folder.
    """
    if Loader.in_charge:
        return
    started_in = Path(get_initial_workdir())
    project = places.enclosing(started_in)
    words = itertools.takewhile(lambda word: word != "torchrun" and not word.endswith(".py"), sys.argv[1:])
    names_file = any(word.startswith(("-f", "--file")) for word in words)  # behind the script, -f is the script's
    if project not in (None, started_in) and not names_file:
        invocation.leave_for(project)
        process.replace([sys.executable, "-m", "doit", *sys.argv[1:]])
    message = f"doit was started where no pyproject.toml names Paceline's loader; {ROOT} has it"
    leave(UsageError(message, hint=f"cd {shlex.quote(str(ROOT))}, then the same command without -k or -f"))


def _action(do: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a task's action: errors become doit's; a returned mapping is kept for other tasks."""

    def run() -> Any:
        try:
            values = do()
        except Exit:
            raise
        except (UsageError, Killed) as error:  # what only the verb can find: an unknown key, a port in use
            leave(error)
        except PacelineError as error:
            refuse(error, str(error))
            return TaskFailed(_summary(error) if error.shown else str(error))
        except (Exception, SystemExit) as error:  # doit would print a traceback, or report success: sys.exit(0)
            if unexpected.is_of_output(error):
                leave(error)
            message = unexpected.error_message(error)
            refuse(error, message)
            return TaskError(message)
        return values if isinstance(values, dict) else None

    return run


def _summary(error: PacelineError) -> str:
    line = error.what.partition("\n")[0]
    short = line if len(line) <= _MOST_SUMMARY else f"{line[:_MOST_SUMMARY].rstrip()}…"
    hint = f"\n  try: {error.hint}" if error.hint else ""
    return f"{short}{'' if short == error.what else ' (the whole error is above)'}{hint}"
