"""Run a step's program locally: in the project folder, with masked output in a log and on the terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pipeline.core import masking
from pipeline.core.places import HOME, IS_INSTALLED, PACKAGES
from pipeline.core.processes import process, threads
from pipeline.keys import rank_environment
from pipeline.steps.key import is_python
from pipeline.steps.step import Making, StepError, filled
from trainers.core import observer
from trainers.core.dependencies import Seen, joined
from trainers.core.observation import Observed, of_host
from trainers.core.observer import PROJECT, SKIP

_LINE = 65_536


def command(making: Making) -> list[str]:
    """Return the command line of a step, with placeholders filled in. Raises StepError."""
    step, out = making.step, str(making.out)
    inputs = [[str(path) for path in group] for group in making.inputs]
    flat = [path for group in inputs for path in group]
    if step.function:
        task = {"function": step.function, "args": dict(sorted(step.args.items())), "inputs": flat, "out": out}
        return [sys.executable, "-m", "trainers.call", json.dumps(task)]
    if isinstance(step.command, str):
        return ["bash", "-euo", "pipefail", "-c", step.command, step.name, *flat]
    words = filled(step, out, inputs)
    return [sys.executable, *words[1:]] if is_python(words[0]) else words


def environment(making: Making, around: Mapping[str, str], site: Path) -> dict[str, str]:
    """Return a rank's environment plus the project on PYTHONPATH, the step's variables, and its arguments for bash.

    Args:
        around: the environment of this process.
        site: the folder with the audit hook, first on PYTHONPATH so that every Python process loads it.

    Raises:
        StepError: Python could not find the hook or the project, because a path contains the separator.
    """
    step = making.step
    for folder in (site, making.root):
        if os.pathsep in str(folder):
            raise StepError(
                f"step {step.name} can't be made here: {folder} holds {os.pathsep!r}, which separates folders in "
                "PYTHONPATH, so that what it reads would not be seen",
                hint=f"another name for the folder, or paths.runs=<a folder without {os.pathsep!r} in its path>",
            )
    home = None if IS_INSTALLED or making.root == HOME else str(HOME)
    path = (str(site), str(making.root), step.env.get("PYTHONPATH"), home)
    own: dict[str, str] = {}
    if isinstance(step.command, str):
        own = {**{name: _text(value) for name, value in step.args.items()}, "out": str(making.out)}
    passed = {**rank_environment.passed(around), **rank_environment.ALWAYS}
    return {**passed, **own, **step.env, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_here(making: Making) -> int:
    """Run the step to its end and return the exit code. It is ended with this process and when ``stop`` is set.

    Raises:
        OSError: its output can't be written to the log; the program is ended.
    """
    argv, seal = command(making), making.out.parent / "seal"
    skipped = [making.out.parent, *(HOME / name for name in PACKAGES if making.root != HOME)]
    own = [(PROJECT, os.path.realpath(making.root)), *((SKIP, os.path.realpath(path)) for path in skipped)]
    zones = [*own, *of_host()]
    observed = Observed(seal, zones)
    env = environment(making, os.environ, observed.site)
    making.program = _program(making, argv[0], env, zones, seal / "program")
    child = process.guarded(argv, cwd=making.root, env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    guard = threads.start(_end_when_stopped, making, child.stdin, name=f"stop {making.step.name}", on_error=making.say)
    try:
        with making.log.open("a", encoding="utf-8") as log:
            _copy(making, child.stdout, log)
    except BaseException:
        child.stdin.close()
        child.wait()  # the caller removes its folder next
        raise
    code = child.wait()
    child.stdin.close()
    guard.join(timeout=1.0)
    making.seen = observed.seen()
    _warn_of_variables(making, [name for name in making.seen.variables if name in os.environ and name not in env])
    shutil.rmtree(seal, ignore_errors=True)
    return code


def _program(
    making: Making, name: str, env: Mapping[str, str], zones: Sequence[tuple[str, str]], notes: Path
) -> dict[str, Any]:
    """Record the executable itself if it lies outside of the project and the system.

    The Python audit hook doesn't see the executable being read. A bash line names no single program.
    """
    notes.mkdir()
    path = shutil.which(str(making.root / name) if "/" in name else name, path=env.get("PATH"))
    if path is not None and isinstance(making.step.command, tuple):
        observer.Watch(zones, str(notes)).look(path, "")
    return Seen(notes).record()


def _warn_of_variables(making: Making, variables: Sequence[str]) -> None:
    """Warn about shell variables that the step read but doesn't receive: only those in its ``env`` count in the key."""
    if variables:
        named = ", ".join(f'{name}: "${{oc.env:{name}}}"' for name in variables)
        making.warn(
            f"step {making.step.name} read {joined(variables)}, which this shell sets and the step doesn't get; "
            f"env: {{{named}}} in its file passes {'it' if len(variables) == 1 else 'them'}, as a part of its key"
        )


def _end_when_stopped(making: Making, stdin: IO[bytes]) -> None:
    """Close the guard's stdin on a stop, which ends the program."""
    while not stdin.closed:
        if making.stop.wait(0.1):
            with suppress(OSError):
                stdin.close()


def _copy(making: Making, stdout: IO[bytes], log: IO[str]) -> None:
    while raw := stdout.readline(_LINE):
        line = masking.shown(raw.decode(errors="replace").rstrip("\n"))
        log.write(f"{line}\n")
        log.flush()
        making.say(f"{making.step.name} | {line}")


def _text(value: object) -> str:
    """Convert a value to a bash variable's text."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
