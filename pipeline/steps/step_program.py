"""The program of one step, run in the project folder: its command line and environment, its output, and what it reads.

The output goes to a log and the terminal, with secrets masked. An audit hook in Python processes notes what is read.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from pipeline.core import masking
from pipeline.core.places import HOME, IS_INSTALLED, PACKAGES
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import Stop
from pipeline.keys import rank_environment
from pipeline.steps.key import is_python
from pipeline.steps.step import Step, StepError, fill_placeholders
from trainers.observation.input_record import InputRecord, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.observer import PROJECT, SKIP
from trainers.observation.observer.watch import Watch
from trainers.observation.processes import ObservedProgram, zones_of_host
from trainers.observation.unkeyed import joined

_LINE_BYTES = 65_536


class ProgramEnd(NamedTuple):
    """The end of a program."""

    exit_code: int
    notes: Notes  # what its Python processes read
    executable: InputRecord  # the record of its executable


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The program of a step: ``inputs`` are the files of each entry of ``step.inputs``, ``out`` gets its outputs."""

    step: Step
    root: Path
    out: Path
    inputs: tuple[tuple[Path, ...], ...]
    log: Path
    stop: Stop
    say: Callable[[str], None]

    def run(self) -> ProgramEnd:
        """Run the program. It is ended when ``stop`` is set, and if this process ends.

        Raises StepError: its command line or environment can't be made; OSError: its log can't be written.
        """
        argv, observations = self._argv(), self.out.parent / "seal"
        # A zone, (kind, real path), tells the audit hook how to treat files below a folder. If folders lie in each
        # other, the innermost decides. Files of the project are noted (PROJECT), but not those of the step's own folder
        # and of Paceline (SKIP). ``zones_of_host`` adds the skipped folders of this computer: Python, packages, system.
        skipped = [self.out.parent, *(HOME / name for name in PACKAGES if self.root != HOME)]
        own_zones = [(PROJECT, os.path.realpath(self.root)), *((SKIP, os.path.realpath(path)) for path in skipped)]
        zones = [*own_zones, *zones_of_host()]
        observed = ObservedProgram(observations, zones)
        env = self._environment(os.environ, observed.site)
        executable = self._executable(argv[0], env, zones, observations / "program")
        child = process.guarded(argv, cwd=self.root, env=env)
        assert child.stdin is not None
        assert child.stdout is not None
        guard = threads.start(self._end_on_stop, child.stdin, name=f"stop {self.step.name}", on_error=self.say)
        try:
            with self.log.open("a", encoding="utf-8") as log:
                self._copy_output(child.stdout, log)
        except BaseException:
            child.stdin.close()  # which ends the program
            child.wait()  # the caller removes the program's folder next
            raise
        exit_code = child.wait()
        child.stdin.close()
        guard.join(timeout=1.0)
        notes = observed.notes()
        self._warn_of_variables([name for name in notes.variables if name in os.environ and name not in env])
        shutil.rmtree(observations, ignore_errors=True)
        return ProgramEnd(exit_code, notes, executable)

    def warn(self, text: str) -> None:
        """Write a warning to the terminal and the log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"WARNING: {text}\n")
        self.say(f"WARNING: {text}")

    def _argv(self) -> list[str]:
        step, out = self.step, str(self.out)
        inputs = [[str(path) for path in group] for group in self.inputs]
        all_inputs = [path for group in inputs for path in group]
        if step.function:
            task = {
                "function": step.function,
                "args": dict(sorted(step.args.items())),
                "inputs": all_inputs,
                "out": out,
            }
            return [sys.executable, "-m", "trainers.call", json.dumps(task)]
        if isinstance(step.command, str):
            return ["bash", "-euo", "pipefail", "-c", step.command, step.name, *all_inputs]
        words = fill_placeholders(step, out, inputs)
        return [sys.executable, *words[1:]] if is_python(words[0]) else words

    def _environment(self, environ: Mapping[str, str], site: Path) -> dict[str, str]:
        """Return a rank's environment with the step's variables, and the arguments of a line for bash.

        PYTHONPATH begins with ``site`` (the audit hook). Raises StepError: a path contains PYTHONPATH's separator.
        """
        step = self.step
        for folder in (site, self.root):
            if os.pathsep in str(folder):
                raise StepError(
                    f"step {step.name} can't be made here: {folder} holds {os.pathsep!r}, which separates folders in "
                    "PYTHONPATH, so that what it reads would not be seen",
                    hint=f"another name for the folder, or paths.runs=<a folder without {os.pathsep!r} in its path>",
                )
        home = None if IS_INSTALLED or self.root == HOME else str(HOME)
        python_path = (str(site), str(self.root), step.env.get("PYTHONPATH"), home)
        arguments: dict[str, str] = {}
        if isinstance(step.command, str):
            arguments = {**{name: _bash_text(value) for name, value in step.args.items()}, "out": str(self.out)}
        passed = {**rank_environment.inheritable(environ), **rank_environment.ALWAYS}
        return {**passed, **arguments, **step.env, "PYTHONPATH": os.pathsep.join(filter(None, python_path))}

    def _executable(
        self, name: str, env: Mapping[str, str], zones: Sequence[tuple[str, str]], notes: Path
    ) -> InputRecord:
        """Record the executable if it lies outside of the project and the system. A line for bash has no single one."""
        # the audit hook can't note it, because the hook runs only in Python processes
        notes.mkdir()
        path = shutil.which(str(self.root / name) if "/" in name else name, path=env.get("PATH"))
        if path is not None and isinstance(self.step.command, tuple):
            Watch(zones, str(notes)).file_read(path)
        return record_inputs(Notes(notes))

    def _warn_of_variables(self, names: Sequence[str]) -> None:
        """Warn of variables of this shell that the step asked for, but gets only if its ``env`` names them."""
        if names:
            env = ", ".join(f'{name}: "${{oc.env:{name}}}"' for name in names)
            self.warn(
                f"step {self.step.name} read {joined(names)}, which this shell sets and the step doesn't get; "
                f"env: {{{env}}} in its file passes {'it' if len(names) == 1 else 'them'}, as a part of its key"
            )

    def _end_on_stop(self, stdin: IO[bytes]) -> None:
        """Close the program's stdin when ``stop`` is set; its guard process then ends it."""
        while not stdin.closed:
            if self.stop.wait(0.1):
                with suppress(OSError):
                    stdin.close()

    def _copy_output(self, stdout: IO[bytes], log: IO[str]) -> None:
        while raw := stdout.readline(_LINE_BYTES):
            line = masking.shown(raw.decode(errors="replace").rstrip("\n"))
            log.write(f"{line}\n")
            log.flush()
            self.say(f"{self.step.name} | {line}")


def _bash_text(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
