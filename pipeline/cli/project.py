"""The doit tasks that a project's dodo.py declares: one for each verb of ``pipeline.cli.verbs``, and the user's steps.

Whether a task is up to date is decided from the run folder, never from doit's database.
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
from pipeline.cli.loader import Exit, Loader, exit_with_error
from pipeline.cli.output import answer_with_error, finish_answer, say
from pipeline.cli.verbs import VERBS, Verb
from pipeline.core import places
from pipeline.core.errors import Killed, PacelineError, UsageError
from pipeline.core.places import ROOT
from pipeline.core.processes import process, unexpected

__all__ = ["DOIT_CONFIG", "task_verbs"]

DOIT_CONFIG = {"default_tasks": ["_overview"], "action_string_formatting": "new"}
_MAX_SUMMARY = 240  # characters

Task = dict[str, Any]  # A task as doit takes it from dodo.py: actions, task_dep, uptodate, …


def task_verbs() -> Iterator[Task]:
    """Return a task for each verb, and an overview, because a bare `doit` starts nothing."""
    yield _overview()
    for name, verb in VERBS.items():
        yield _verb_task(name, verb)


def _verb_task(name: str, verb: Verb) -> Task:
    """Return the task of a verb, whose functions are imported when the task runs."""
    _ensure_loader()
    task = {
        **_task(name, lambda: _finish_answer(name, _call(f"commands.{verb.module}.{name}"))),
        "title": lambda task: _call("finished.title", task.name),
        # `doit evaluate KEY` takes an existing run, so nothing is fetched or trained before it
        "task_dep": [] if "run" in invocation.parse(sys.argv[1:]).options else list(verb.after),
        "meta": {"answers": verb.answers},  # for our reporter (doit_plugins.py)
        "doc": verb.summary,
    }
    if verb.is_done:
        task["uptodate"] = [lambda: bool(_finish_answer(name, _call(f"finished.{verb.is_done}")))]
    return task


def _finish_answer(name: str, result: Any) -> Any:
    """Print the JSON answer of the verb ``name`` if it was typed and has done its work; return its ``result``.

    ``result`` is False if an up-to-date check found that there is work to do.
    """
    was_typed = name == invocation.parse(sys.argv[1:]).verb  # other verbs run before it, as task_dep says
    if result is not False and was_typed:
        finish_answer()
    return result


def step(name: str, **fields: Any) -> None:
    """Declare a step in dodo.py with the fields of conf/step/NAME.yaml; ``function`` may be a Python function."""
    from pipeline.steps import declare  # late import: a project without steps loads nothing of them

    declare(name, **fields)


def of_step(name: str) -> Task:
    """Return a task ``step-NAME`` that makes a step, so that tasks of your own can depend on it.

    They say ``task_dep: ["step-clean"]``, and get the step's folder by ``getargs: {"out": ("step-clean", "out")}``.
    """
    _ensure_loader()

    def make() -> dict[str, str]:
        return {"out": str(_call("commands.steps.make", name))}

    return {**_task(f"step-{name}", make), "doc": f"make step {name} and what it needs"}


def _overview() -> Task:
    def show() -> None:
        from pipeline.cli import help as pages  # imported late: for a bare `doit` alone

        say(pages.overview())

    return _task("_overview", show)


def _call(function: str, *args: object) -> Any:
    """Import a function of ``pipeline.cli``, named as in ``commands.train.train``, and call it with the session."""
    from pipeline.cli.session import session  # imported late: `doit list` and help need no configuration

    module, _, name = function.rpartition(".")
    return getattr(import_module(f"pipeline.cli.{module}"), name)(session(), *args)


def _task(name: str, do: Callable[[], Any]) -> Task:
    return {
        "basename": name,
        "actions": [_action(do)],
        "verbosity": 2,
        "io": {"capture": False},  # doit would keep every line of a training in memory
    }


def _ensure_loader() -> None:
    """Make sure that doit uses Paceline's loader: restart the command in the project's folder, or refuse it."""
    if Loader.in_charge:
        return
    # doit looks for pyproject.toml only where it starts: in a subfolder its own loader takes overrides for tasks
    started_in = Path(get_initial_workdir())
    project = places.enclosing(started_in)
    # `doit -f FILE` names another dodo.py; a -f behind the script is the script's
    words = itertools.takewhile(lambda word: word != "torchrun" and not word.endswith(".py"), sys.argv[1:])
    names_file = any(word.startswith(("-f", "--file")) for word in words)
    if project not in (None, started_in) and not names_file:
        invocation.change_folder(project)
        process.replace([sys.executable, "-m", "doit", *sys.argv[1:]])
    message = f"doit was started where no pyproject.toml names Paceline's loader; {ROOT} has it"
    exit_with_error(UsageError(message, hint=f"cd {shlex.quote(str(ROOT))}, then the same command without -k or -f"))


def _action(do: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``do`` as an action of a doit task, which returns errors as doit wants them."""

    def run() -> Any:
        try:
            values = do()
        except Exit:
            raise
        except (UsageError, Killed) as error:  # both have exit codes of their own, and a failed task would end with 1
            exit_with_error(error)
        except PacelineError as error:
            answer_with_error(error, str(error))
            return TaskFailed(_summary(error) if error.shown else str(error))
        # of an exception doit would print a traceback, and sys.exit(0) would count as success
        except (Exception, SystemExit) as error:
            if unexpected.is_of_output(error):
                exit_with_error(error)
            message = unexpected.error_message(error)
            answer_with_error(error, message)
            return TaskError(message)
        return values if isinstance(values, dict) else None  # doit keeps a mapping for other tasks (getargs)

    return run


def _summary(error: PacelineError) -> str:
    """Return the first line and the hint of an error that was printed as a whole already."""
    line = error.what.partition("\n")[0]
    short = line if len(line) <= _MAX_SUMMARY else f"{line[:_MAX_SUMMARY].rstrip()}…"
    hint = f"\n  try: {error.hint}" if error.hint else ""
    return f"{short}{'' if short == error.what else ' (the whole error is above)'}{hint}"
