"""Run steps: each once, in a temporary folder that is renamed into place.

A program runs in the project folder, with masked output in a log and on the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from graphlib import TopologicalSorter
from pathlib import Path
from typing import IO, Any

from pipeline.core import masking
from pipeline.core.errors import Killed, PacelineError, os_reason
from pipeline.core.files import fsync, remove_leftovers, sha256_file, temporary_prefix, write_hint, write_json
from pipeline.core.locks import held
from pipeline.core.places import HOME, IS_INSTALLED, PACKAGES, shown
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import CTRL_C, Interruptible, Stop
from pipeline.data.request import record_reads
from pipeline.keys import rank_environment
from pipeline.keys.content_key import ContentKey
from pipeline.steps import store
from pipeline.steps.graph import Graph, Standing
from pipeline.steps.key import changed, described, is_python, sources_of
from pipeline.steps.step import PREFIX, Making, Say, Step, StepError, filled
from trainers.observation.input_record import files_changed_meanwhile, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.observer import PROJECT, SKIP
from trainers.observation.observer.watch import Watch
from trainers.observation.processes import ObservedProgram, zones_of_host
from trainers.observation.unkeyed import joined

_END_LINES, _END_CHARACTERS = 12, 4000
_LOOK_S = 0.1
_LINE = 65_536
_CALLER = ("trainers/__init__.py", "trainers/call.py")  # the code that calls functions


def make_all(graph: Graph, names: Iterable[str], say: Say, *, at_once: int = 1) -> int:
    """Run these steps and those they need, if not up to date; return how many were run.

    Args:
        at_once: the number of independent steps that run concurrently.

    Raises:
        StepError: a step can't be run; nothing was started.
        PacelineError: a step failed; steps in progress are ended.
        Killed: stopped by a signal.
    """
    order = graph.order(names)
    todo = [name for name in order if graph.standing(name).made is None]
    if not todo:
        return 0
    for name in todo:
        masking.remember(graph.step(name).secrets)
    stop = Stop()
    try:
        with Interruptible() as signals:
            try:
                work = _Work(graph, say, stop)
                _conduct(graph, todo, work, max(1, at_once))
            finally:
                signals.hold()
                signals.left = f"; {CTRL_C.partition('; ')[2]}"
    finally:
        graph.forget()
    return len(work.made)


def _conduct(graph: Graph, todo: Collection[str], work: _Work, at_once: int) -> None:
    """Run each step in a thread once all steps that it needs are done."""
    order = TopologicalSorter({name: {*graph.step(name).upstream}.intersection(todo) for name in todo})
    order.prepare()
    ready, running = deque[str](), dict[Future[None], str]()
    with ThreadPoolExecutor(at_once, thread_name_prefix="step") as pool:
        try:
            while order.is_active():
                ready += order.get_ready()
                while ready and len(running) < at_once:
                    graph.forget()
                    standing = graph.standing(ready[0])  # raises if a required file has disappeared
                    running[pool.submit(work.make, standing)] = ready.popleft()
                for future in wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                    future.result()
                    order.done(running.pop(future))
        except BaseException as error:  # the pool then waits until the other programs have ended
            work.stop.tell("another step's failure" if isinstance(error, Exception) else "a signal")
            raise


class _Work:
    """State shared by the threads."""

    def __init__(self, graph: Graph, say: Say, stop: Stop) -> None:
        self.graph, self.say, self.stop = graph, say, stop
        self.made: list[str] = []

    def make(self, standing: Standing) -> None:
        """Run one step whose inputs all exist. Raises PacelineError."""
        step, key = standing.step, standing.key
        if standing.made is not None:
            return
        assert key is not None, "it is started when all that it needs is made"
        folder = store.folder_of(self.graph.runs_dir, step, key)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with held(store.lock_of(folder), meanwhile=self._waiting(step)):
                made, _ = store.look(folder, key, self.graph.root)
                if made is not None:
                    where = shown(folder, self.graph.root)
                    self.say(f"step {step.name} was made by another command meanwhile; {where}")
                    return
                remove_leftovers([folder.parent])
                self._build(standing, key, folder)
        except OSError as error:
            what = f"step {step.name} can't be kept in {folder.parent}: {os_reason(error)}"
            raise PacelineError(what, hint=write_hint(error, self.graph.runs_dir)) from error

    def _waiting(self, step: Step) -> Callable[[], None]:
        """Return what is called while another command makes the step: it says so once, and ends the wait on a stop."""
        said = [f"another command is making step {step.name}; waiting for it"]

        def look() -> None:
            if self.stop.requested:
                raise Killed(f"step {step.name} was stopped by {self.stop.by}")
            while said:
                self.say(said.pop())

        return look

    def _build(self, standing: Standing, key: ContentKey, folder: Path) -> None:
        step, root = standing.step, self.graph.root
        building = Path(tempfile.mkdtemp(prefix=temporary_prefix(f".{folder.name}"), dir=folder.parent))
        try:
            building.chmod(0o755)
            (building / store.OUT).mkdir()
            making = Making(
                step=step,
                root=root,
                out=building / store.OUT,
                inputs=standing.inputs,
                log=store.log_of(folder),
                stop=self.stop,
                say=self.say,
            )
            inputs = [os.path.realpath(path) for group in standing.inputs for path in group]
            keyed = {**dict.fromkeys(inputs, ""), **_code(step, root)}
            self.say(f"step {step.name}: {', '.join(standing.why)}")
            begun = time.time()
            self._run(making)
            self._refuse_changed(step, key)
            record = _record(standing, key, store.digests(building / store.OUT), time.time() - begun)
            if making.notes is not None:
                self._refuse_read(making.notes, step, keyed)
                own = {*step.env, *(step.args if isinstance(step.command, str) else ()), "out", "PYTHONPATH"}
                reads = record_reads(making.notes, root, keyed, inputs, own)
                record["dependencies"] = {**reads, "nodes": [making.program]}  # counts without being listed as an input
                self._warn_of_files(making, [*reads["files"]])
            write_json(building / store.RECORD, record)
            shutil.copyfile(making.log, building / store.LOG)
            _put_in_place(building, folder)
            making.log.unlink(missing_ok=True)
            self.made.append(step.name)
            self.say(f"made step {step.name} in {time.time() - begun:.1f} s; {shown(folder, root)}")
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _run(self, making: Making) -> None:
        """Run the program and check its outputs.

        Raises PacelineError: it failed, or left fewer outputs than declared.
        """
        step = making.step
        with making.log.open("w", encoding="utf-8"):
            pass
        code = run_here(making)
        if making.stop.requested:
            raise Killed(f"step {step.name} was stopped by {making.stop.by}; {CTRL_C.partition('; ')[2]}")
        log = shown(making.log, making.root)
        if code != 0:
            signal = f" (signal {code - 128})" if code > 128 else ""
            what = f"step {step.name} ended with exit code {code}{signal}; nothing of it is kept but {log}"
            raise PacelineError(f"{what}{_end_of(making.log)}", hint="fix it, then the same command")
        links = [path for path in making.out.rglob("*") if path.is_symlink()]
        if links:
            raise PacelineError(
                f"step {step.name} left a link, {links[0].relative_to(making.out)}: what it leads to may change",
                hint="let it write the file itself",
            )
        if odd := [path for path in making.out.rglob("*") if not path.is_file() and not path.is_dir()]:
            raise PacelineError(
                f"step {step.name}: {odd[0].relative_to(making.out)} is no regular file",
                hint="let it remove its pipes and sockets before it ends",
            )
        if missing := store.missing_outputs(step, making.out):
            left = sorted(path.relative_to(making.out).as_posix() for path in making.out.rglob("*") if path.is_file())
            raise PacelineError(
                f"step {step.name} ended with exit code 0 without its outputs {', '.join(missing)}; in its folder "
                f"{{out}} it left {', '.join(left[:5]) or 'nothing'}{_end_of(making.log)}",
                hint="let it write them into that folder",
            )

    def _warn_of_files(self, making: Making, files: Sequence[str]) -> None:
        if not files:
            return
        was, them = ("was", "it") if len(files) == 1 else ("were", "them")
        steps = f"{shown(store.steps_dir(self.graph.runs_dir), making.root)}/"
        named = [re.sub(rf"^{re.escape(steps)}(.+)-[0-9a-f]+/out/", rf"{PREFIX}\1/", name) for name in files]
        what = f"{joined(named)} {was} read; add {them} to its inputs"
        making.warn(f"the key of step {making.step.name} is not complete: {what}")

    def _refuse_changed(self, step: Step, key: ContentKey) -> None:
        """Raise PacelineError if inputs or code changed since the step began."""
        now = self.graph.fresh_key(step)
        if now.digest != key.digest:
            what = "; ".join(changed({"parts": key.parts, **described(step)}, step, now))
            raise PacelineError(f"while step {step.name} was made: {what}", hint="the same command again")

    def _refuse_read(self, notes: Notes, step: Step, keyed: Mapping[str, str]) -> None:
        """Raise PacelineError if a file of the key had other content when the step opened it."""
        if edited := files_changed_meanwhile(notes, self.graph.root, keyed):
            raise PacelineError(
                f"step {step.name} read {joined(edited)} with another content than its key holds: somebody edits it",
                hint="the same command again",
            )


def _code(step: Step, root: Path) -> dict[str, str]:
    """Return the sha256 of each code file, by its real path."""
    paths = [*sources_of(step, root).values(), *(root / name for name in _CALLER if (root / name).is_file())]
    return {os.path.realpath(path): sha256_file(path) for path in paths}


def _record(standing: Standing, key: ContentKey, files: dict[str, str], duration_s: float) -> dict[str, Any]:
    """Return the content of step.json."""
    step = standing.step
    return {
        "name": step.name,
        "key": key.short,
        "digest": key.digest,
        "parts": key.parts,
        **described(step),
        "files": files,
        "duration_s": round(duration_s, 3),
        "unix_time": time.time(),
    }


def _put_in_place(building: Path, folder: Path) -> None:
    """Move the folder into place with one rename, after an altered older one was moved away."""
    for path in [*building.rglob("*"), building]:
        if path.is_file() or path.is_dir():
            fsync(path)
    aside = building.with_name(f"{building.name}x")
    if folder.exists():  # altered, or without step.json
        folder.rename(aside)
    building.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
    fsync(folder.parent)


def _end_of(log: Path) -> str:
    """Return the last lines of a log, for an error message."""
    text = log.read_text(encoding="utf-8", errors="replace")[-_END_CHARACTERS:]
    lines = text.rstrip().splitlines()[-_END_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


# ------------------------------------------------------------------------------ a step's program
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
    zones = [*own, *zones_of_host()]
    observed = ObservedProgram(seal, zones)
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
    making.notes = observed.notes()
    _warn_of_variables(making, [name for name in making.notes.variables if name in os.environ and name not in env])
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
        Watch(zones, str(notes)).file_read(path)
    return {**record_inputs(Notes(notes))}


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
