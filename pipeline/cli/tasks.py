"""The tasks that dodo.py makes of the verbs.

Whether a task is up to date is asked of the run folder, never of doit's database.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from doit import get_initial_workdir
from doit.exceptions import TaskError, TaskFailed

from pipeline.cli import answers, clone, invocation
from pipeline.cli.clone import ROOT
from pipeline.cli.loader import Left, Loader, leave
from pipeline.cli.output import say
from pipeline.cli.verbs import Verb
from pipeline.core import places
from pipeline.core.errors import Killed, PacelineError, UsageError
from pipeline.core.processes import process, unexpected

Task = dict[str, Any]


def of_verb(name: str, verb: Verb) -> Task:
    """The task of a verb: its action, what comes first, and how doit learns that there is nothing to do."""
    _need_loader()
    task = {
        **_base(name, lambda: _answering(name, _function(verb.module, name)())),
        "title": lambda task: _function("finished", "title")(task.name),
        "task_dep": _dependencies(verb.after),
        "meta": {"answers": verb.answers},
        "doc": verb.summary,
    }
    if verb.is_done:
        task["uptodate"] = [lambda: bool(_answering(name, _function("finished", verb.is_done)()))]
    return task


def _answering(name: str, result: Any) -> Any:
    """Pass on what the function of a verb has returned. Where that is the verb that was typed, and it is done, its JSON
    answer is due now; a verb that comes first (fetch, before train) has none."""
    is_due = result is not False and name == invocation.parse(sys.argv[1:]).verb
    if is_due:
        answers.finish()
    return result


def step(name: str, **fields: Any) -> None:
    """A step told in dodo.py instead of conf/step/NAME.yaml, with the same fields; ``function`` may be the function."""
    from pipeline.steps.registry import declare  # nothing of steps where there are none

    declare(name, **fields)


def of_step(name: str) -> Task:
    """A task ``step-NAME`` that makes a step, for tasks of your own: ``task_dep: ["step-clean"]``, and its folder by
    ``getargs: {"out": ("step-clean", "out")}``."""
    _need_loader()

    def make() -> dict[str, str]:
        from pipeline.cli.commands import steps  # composes: only when the task runs

        return {"out": str(steps.make(name))}

    return {**_base(f"step-{name}", make), "doc": f"make step {name} and what it needs"}


def overview() -> Task:
    """What a bare `doit` shows; hidden from `doit list`."""

    def show() -> None:
        from pipeline.cli import help as pages  # of a bare `doit` alone

        say(pages.overview())

    return _base("_overview", show)


def _function(module: str, name: str) -> Callable[..., Any]:
    """Of a module of ``pipeline.cli.commands``, which is imported only now: the verb runs."""
    function: Callable[..., Any] = getattr(import_module(f"pipeline.cli.commands.{module}"), name)
    return function


def _base(name: str, do: Callable[[], Any]) -> Task:
    return {
        "basename": name,
        "actions": [_action(do)],
        "verbosity": 2,
        "io": {"capture": False},  # doit would keep every line of a training in memory
    }


def _need_loader() -> None:
    """doit's own loader takes overrides for tasks and sets no root.

    doit reads pyproject.toml of the folder where it is started alone: in a subfolder of the project the same command
    starts anew in the project's folder.
    """
    if not Loader.in_charge:
        started_in = Path(get_initial_workdir())
        project = places.enclosing(started_in)
        if project not in (None, started_in) and not any(word.startswith(("-f", "--file")) for word in _of_doit()):
            clone.start_elsewhere(project)
            process.replace([sys.executable, "-m", "doit", *sys.argv[1:]])
        what = f"doit was started where no pyproject.toml names Paceline's loader; {ROOT} has it"
        leave(UsageError(what, hint=f"cd {shlex.quote(str(ROOT))}, then the same command without -k or -f"))


def _of_doit() -> list[str]:
    """The words in front of a script's command line, whose own -f is none of doit's."""
    at = next((at for at, word in enumerate(sys.argv) if at and (word == "torchrun" or word.endswith(".py"))), None)
    return sys.argv[:at]


def _action(do: Callable[[], Any]) -> Callable[[], Any]:
    """What a task does, with its errors told as doit wants them; a mapping that it returns is kept for other tasks."""

    def run() -> Any:
        try:
            values = do()
        except Left:
            raise
        except (UsageError, Killed) as error:  # of what can only be checked by the verb: a run's key, a port
            leave(error)
        except PacelineError as error:
            answers.refuse(error, str(error))
            return TaskFailed(
                f"{error.what.partition(chr(10))[0]} (the whole error is above)" if error.shown else str(error)
            )
        except (Exception, SystemExit) as error:  # doit would print a traceback, or end well: sys.exit(0)
            if unexpected.is_of_output(error):
                leave(error)
            message = unexpected.error_message(error)
            answers.refuse(error, message)
            return TaskError(message)
        return values if isinstance(values, dict) else None

    return run


def _dependencies(after: Sequence[str]) -> list[str]:
    """None where ``run=KEY`` names a run that exists already."""
    return [] if not after or "run" in invocation.parse(sys.argv[1:]).options else list(after)
