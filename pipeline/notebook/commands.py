"""Commands that a notebook starts: ``train`` and ``sweep`` are `doit train` and `doit sweep` in a process of their own.

So key, lock, progress and Ctrl-C are those of the command line, and the kernel never holds what a training needs.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_text, hydra_value
from pipeline.core.processes import process, threads
from pipeline.notebook.run import Run, table
from pipeline.sweep.report import BY, MAXIMIZE, MINIMIZE

_GROUPS = ("cluster", "dataset", "experiment", "init", "model", "optimizer", "program", "schedule", "search", "seed")
_SCRIPT_VERBS = ("run", "torchrun")
"""The first words of a line that starts a script."""
_EVENT = '{"schema": "paceline.event/'


class CommandError(Exception):
    """A command that failed. ``code`` and ``hint`` are those of its JSON answer (docs/json.md)."""

    def __init__(self, message: str, *, code: str, hint: str | None) -> None:
        super().__init__(message if hint is None else f"{message}\n  try: {hint}")
        self.code, self.hint = code, hint


def train(*overrides: str, quiet: bool = False, **fields: Any) -> Run:
    """Train a run to its end, or return it at once if it is finished: what `doit train` does.

    Args:
        overrides: as on the command line, ``"experiment=quickstart"``, ``"optimizer.lr=0.1"``; or the line that starts
            a script, ``"run train.py --epochs 3"`` or ``"torchrun --nproc-per-node 2 train.py"``.
        quiet: print nothing.
        fields: the same with values of Python: ``seed=3``, ``model="resnet18"``, ``optimizer__lr=0.1``. A name that is
            the last part of exactly one field stands for it: ``lr=0.1``. Of a script's line they are its options.

    Raises:
        CommandError: the training failed, or an override is wrong.
        KeyboardInterrupt: it was interrupted. The run is KILLED, and the same call goes on with it.
    """
    words = _script_line(overrides, fields) or [*overrides, *_overrides(fields, overrides)]
    data = answer("train", *words, quiet=quiet)
    return Run(key=str(data["key"]), path=Path(data["folder"]))


def sweep(*overrides: str, quiet: bool = False, **fields: Any) -> Any:
    """Train every combination: what `doit sweep` does. A list as a field's value stands for its trials.

    Args:
        overrides: as on the command line, ``"optimizer.lr=0.1,0.01"``, ``"seed=range(3)"``; or a script's line.
        quiet: print nothing.
        fields: as for ``train``; ``lr=[0.1, 0.01]`` makes trials.

    Returns:
        One row a trial, best first: a pandas DataFrame, or a list of dicts where pandas isn't installed.

    Raises:
        CommandError: trials have failed; `paceline.runs(state="FAILED")` lists them.
        KeyboardInterrupt: it was interrupted; the same call goes on.
    """
    words = _script_line(overrides, fields) or [*overrides, *_overrides(fields, overrides, sweeps=True)]
    data = answer("sweep", *words, quiet=quiet)
    rows = _best_first(data)
    return table(
        [{**_chosen(trial), **trial["values"], "state": trial["state"], "key": trial["key"]} for trial in rows]
    )


def _best_first(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Sort a sweep's trials by the metric that decides; those without a number of it come last."""
    best = data["best"] or {"by": BY, "direction": MAXIMIZE}

    def order(trial: dict[str, Any]) -> tuple[bool, float]:
        value = float(trial["values"].get(best["by"], math.nan))  # of "inf" too, as JSON has no such number
        return math.isnan(value), value if best["direction"] == MINIMIZE else -value

    return sorted(data["trials"], key=order)


def _chosen(trial: dict[str, Any]) -> dict[str, str]:
    pairs = (word.lstrip("+").partition("=") for word in trial["chosen"])
    return {name: value for name, _, value in pairs}


# ------------------------------------------------------------------------------------------ one command
def answer(verb: str, *words: str, quiet: bool = False) -> Any:
    """Run `doit VERB …` to its end and return the data of its JSON answer. What it tells people is printed as it comes.

    Raises:
        CommandError: it failed.
        KeyboardInterrupt: it was interrupted, and has ended in order.
    """
    starts_script = bool(words) and words[0] in _SCRIPT_VERBS
    # --json stands before the script, as all words behind it are the script's
    typed = [words[0], "--json", *words[1:]] if starts_script else [*words, "json=1"]
    argv = [sys.executable, "-m", "pipeline.cli.main", verb, *typed]
    with Path(os.devnull).open("rb") as nothing:
        child = process.stream(argv, stdin=nothing, env=process.of_this_clone())
    assert child.stdout is not None
    assert child.stderr is not None
    shown = threads.start(_show, child.stderr, quiet, name="progress", on_error=lambda _: None)
    try:
        text = _without_events(child.stdout)
        child.wait()
    except BaseException:
        _interrupt(child)
        raise
    finally:
        shown.join()
        child.stdout.close()
    return _data(text, child.returncode)


def _without_events(stdout: IO[bytes]) -> str:
    lines = (line.decode(errors="replace") for line in stdout)
    return "".join(line for line in lines if not line.startswith(_EVENT))


def _show(stderr: IO[bytes], quiet: bool) -> None:
    """Print the lines up to the error, which the exception tells."""
    with stderr:
        for line in stderr:
            quiet = quiet or line.startswith(b"ERROR: ")
            if not quiet:
                print(line.decode(errors="replace"), end="", flush=True)


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    """Pass the interrupt on, and wait until the command has recorded its run as KILLED. A second one doesn't wait."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def _data(text: str, code: int) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"the command ended with {code} and without an answer", code="failed", hint=None) from error
    if known := value["error"]:
        raise CommandError(known["message"], code=known["code"], hint=known["hint"])
    return value["data"]


# ------------------------------------------------------------------------------------------ overrides
def _script_line(typed: tuple[str, ...], fields: dict[str, Any]) -> list[str]:
    """Return the words of a line that starts a script, with ``fields`` as its options; [] if it is no such line.

    A list is swept. True gives the option alone; any other value is written behind it.
    """
    words = shlex.split(typed[0]) if len(typed) == 1 else [*typed]
    if words and words[0].endswith(".py") and "=" not in words[0]:
        raise UsageError(f"{words[0]} is a script", hint=f'paceline.train("run {shlex.join(words)}")')
    if not words or words[0] not in _SCRIPT_VERBS:
        return []
    sweeps, options = list[str](), list[str]()
    for name, value in fields.items():
        if isinstance(value, (list, tuple, range)):
            sweeps += ["--sweep", f"{name}={','.join(map(str, value))}"]
        else:
            options += [f"--{name}", *([] if value is True else [str(value)])]
    return [words[0], *sweeps, *words[1:], *options]


def _overrides(fields: dict[str, Any], typed: tuple[str, ...], *, sweeps: bool = False) -> Iterator[str]:
    """Yield an override for each of ``fields``. With ``sweeps`` a list stands for the values of its trials.

    ``typed`` are the words beside them, which decide what fields there are. Raises UsageError: a name that is no
    field's, or the last part of several.
    """
    known: list[str] = []
    for name, value in fields.items():
        field = name.replace("__", ".")
        if "." not in field and field not in _GROUPS:
            known = known or _fields_of(typed)
            field = _meant(field, known)
        if sweeps and isinstance(value, (list, tuple, range)):
            yield f"{field}={','.join(_text(item) for item in value)}"
        else:
            yield f"{field}={_text(value)}"


def _fields_of(typed: tuple[str, ...]) -> list[str]:
    words = [word for word in typed if "," not in word and "(" not in word]
    return [str(item["field"]) for item in answer("config", *words, quiet=True)]


def _meant(name: str, known: list[str]) -> str:
    found = [field for field in known if field == name or field.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"{name} is no field of the configuration", hint="doit config lists all fields")
    spelt = " or ".join(f"{field.replace('.', '__')}=…" for field in found)
    raise UsageError(f"{name} is the last part of {len(found)} fields", hint=spelt)


def _text(value: Any) -> str:
    return hydra_value(value) if isinstance(value, str) else hydra_text(value)
