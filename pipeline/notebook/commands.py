"""Commands that a notebook starts: ``train`` and ``sweep`` are `doit train` and `doit sweep` in a process of their own.

So key, lock, progress and Ctrl-C are those of the command line, and the kernel never holds what a training needs.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from pipeline.cli.output import Failure, is_event, read_envelope
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.printable import hydra_text, hydra_value
from pipeline.core.processes import process, threads
from pipeline.notebook.run import Run, table
from pipeline.sweep.results import BY, MAXIMIZE, MINIMIZE

_GROUPS = ("cluster", "dataset", "experiment", "init", "model", "optimizer", "program", "schedule", "search", "seed")
_SCRIPT_VERBS = ("run", "torchrun")
"""The first words of a line that starts a script."""


class CommandError(Exception):
    """A command that failed. ``code`` and ``hint`` are those of its JSON answer (docs/json.md)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message if failure.hint is None else f"{failure.message}\n  try: {failure.hint}")
        self.code, self.hint = failure.code, failure.hint


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
    result = run_verb("train", words, quiet=quiet)
    return Run(key=str(result["key"]), path=Path(result["folder"]))


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
    swept = run_verb("sweep", words, quiet=quiet)
    best = swept["best"] or {"by": BY, "direction": MAXIMIZE}
    trials = [Trial(**{name: trial[name] for name in Trial._fields}) for trial in swept["trials"]]
    return table([trial.as_row() for trial in _best_first(trials, best["by"], best["direction"])])


class Trial(NamedTuple):
    """A trial of `doit sweep --json`; ``chosen`` are the overrides that distinguish it, ``values`` its figures."""

    key: str
    state: str
    chosen: Sequence[str]
    values: Mapping[str, Any]

    def as_row(self) -> dict[str, Any]:
        """Return a column for each field that distinguishes the trial, and for each figure."""
        fields = (word.lstrip("+").partition("=") for word in self.chosen)
        return {**{name: value for name, _, value in fields}, **self.values, "state": self.state, "key": self.key}


def _best_first(trials: Sequence[Trial], metric: str, direction: str) -> list[Trial]:
    """Sort trials by the metric that decides; those without a number of it come last."""

    def order(trial: Trial) -> tuple[bool, float]:
        value = float(trial.values.get(metric, math.nan))  # of "inf" too, as JSON has no such number
        return math.isnan(value), value if direction == MINIMIZE else -value

    return sorted(trials, key=order)


# ------------------------------------------------------------------------------------------ one command
def run_verb(verb: str, words: Sequence[str], *, quiet: bool = False) -> Any:
    """Run `doit VERB WORDS` to its end, print its progress as it comes, and return the data of its JSON answer.

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
    progress = threads.start(_print_progress, child.stderr, quiet, name="progress", on_error=lambda _: None)
    try:
        stdout = b"".join(line for line in child.stdout if not is_event(line))
        child.wait()
    except BaseException:
        _interrupt(child)
        raise
    finally:
        progress.join()
        child.stdout.close()
    try:
        answered = read_envelope(stdout, child.returncode)
    except PacelineError as error:
        raise CommandError(Failure.of(error)) from error
    if answered["error"]:
        raise CommandError(Failure(**answered["error"]))
    return answered["data"]


def _print_progress(stderr: IO[bytes], quiet: bool) -> None:
    """Print the lines up to the error, which the exception repeats."""
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


def _overrides(fields: Mapping[str, Any], typed: tuple[str, ...], *, sweeps: bool = False) -> Iterator[str]:
    """Yield an override for each of ``fields``. With ``sweeps`` a list stands for the values of its trials.

    ``typed`` are the words beside them, which decide what fields there are. Raises UsageError: a name that is no
    field's, or the last part of several.
    """
    known: list[str] = []
    for name, value in fields.items():
        field = name.replace("__", ".")
        if "." not in field and field not in _GROUPS:
            known = known or _field_names(typed)
            field = _whole_name(field, known)
        if sweeps and isinstance(value, (list, tuple, range)):
            yield f"{field}={','.join(_text(item) for item in value)}"
        else:
            yield f"{field}={_text(value)}"


def _field_names(typed: tuple[str, ...]) -> list[str]:
    words = [word for word in typed if "," not in word and "(" not in word]
    return [str(item["field"]) for item in run_verb("config", words, quiet=True)]


def _whole_name(name: str, known: list[str]) -> str:
    """Return the field whose name, or the last part of it, is ``name``. Raises UsageError: none is, or several."""
    found = [field for field in known if field == name or field.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"{name} is no field of the configuration", hint="doit config lists all fields")
    spelt = " or ".join(f"{field.replace('.', '__')}=…" for field in found)
    raise UsageError(f"{name} is the last part of {len(found)} fields", hint=spelt)


def _text(value: Any) -> str:
    return hydra_value(value) if isinstance(value, str) else hydra_text(value)
