"""The maker of steps that aren't up to date: runs each once, in a temporary folder that is renamed into place."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pipeline.config.step_source import StepState
from pipeline.core import masking
from pipeline.core.errors import Killed, PacelineError, os_reason
from pipeline.core.files import expanded, fsync, remove_leftovers, sha256_file, temporary_prefix, write_hint, write_json
from pipeline.core.locks import held
from pipeline.core.places import shown
from pipeline.core.processes.signals import CTRL_C, Interruptible, Stop
from pipeline.data.request import stored_record
from pipeline.keys.content_key import ContentKey
from pipeline.steps import step_folders
from pipeline.steps.graph import Graph, StepStatus
from pipeline.steps.key import StepVersion, changed, sources_of
from pipeline.steps.step import PREFIX, Say, Step, split_source
from pipeline.steps.step_folders import StepRecord
from pipeline.steps.step_program import ProgramEnd, StepProgram
from trainers.observation.input_record import files_changed_meanwhile, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.unkeyed import joined

_END_LINES, _END_CHARACTERS = 12, 4000
_LOOK_S = 0.1
_CALLER = ("trainers/__init__.py", "trainers/call.py")  # the code that calls the function of a step


def make_all(graph: Graph, names: Iterable[str], say: Say, *, at_once: int = 1) -> int:
    """Run these steps and the steps that they need, if they aren't up to date; return how many were run.

    ``at_once``: how many run at a time. Raises StepError, PacelineError, Killed.
    """
    order = graph.order(names)
    to_run = [name for name in order if graph.status(name).made is None]
    if not to_run:
        return 0
    for name in to_run:
        masking.remember(graph.step(name).secrets)
    stop = Stop()
    try:
        with Interruptible() as signals:
            try:
                maker = _Maker(graph, say, stop)
                _run_in_order(graph, to_run, maker, max(1, at_once))
            finally:
                # a second Ctrl-C must not interrupt the end of the programs
                signals.hold()
                signals.message_end = f"; {CTRL_C.partition('; ')[2]}"
    finally:
        graph.forget()
    return len(maker.made)


def _run_in_order(graph: Graph, to_run: Collection[str], maker: _Maker, at_once: int) -> None:
    """Run these steps, ``at_once`` at a time, each as soon as the steps that it needs are made."""
    order = TopologicalSorter({name: {*graph.step(name).upstream}.intersection(to_run) for name in to_run})
    order.prepare()
    ready, running = deque[str](), dict[Future[None], str]()
    with ThreadPoolExecutor(at_once, thread_name_prefix="step") as pool:
        try:
            while order.is_active():
                ready += order.get_ready()
                while ready and len(running) < at_once:
                    graph.forget()  # steps that were made since have outputs now
                    status = graph.status(ready[0])  # raises if a required file has disappeared
                    running[pool.submit(maker.make, status)] = ready.popleft()
                for future in wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                    future.result()
                    order.done(running.pop(future))
        except BaseException as error:  # end the other programs, for which the pool waits
            maker.stop.request("another step's failure" if isinstance(error, Exception) else "a signal")
            raise


class _Maker:
    """Makes single steps, in several threads at a time."""

    def __init__(self, graph: Graph, say: Say, stop: Stop) -> None:
        self.graph, self.say, self.stop = graph, say, stop
        self.made: list[str] = []

    def make(self, status: StepStatus) -> None:
        """Run one step whose inputs all exist. Raises PacelineError."""
        step, key = status.step, status.key
        if status.made is not None:
            return
        assert key is not None, "it is started when all that it needs is made"
        folder = step_folders.folder_of(self.graph.runs_dir, step, key)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with held(step_folders.lock_of(folder), meanwhile=self._waiting_for_another(step)):
                # another command may have made it while this one waited for the lock
                made, _ = step_folders.find_made(folder, key, self.graph.root)
                if made is not None:
                    shown_folder = shown(folder, self.graph.root)
                    self.say(f"step {step.name} was made by another command meanwhile; {shown_folder}")
                    return
                remove_leftovers([folder.parent])
                self._build(status, key, folder)
        except OSError as error:
            raise PacelineError(
                f"step {step.name} can't be kept in {folder.parent}: {os_reason(error)}",
                hint=write_hint(error, self.graph.runs_dir),
            ) from error

    def _waiting_for_another(self, step: Step) -> Callable[[], None]:
        """Return a function to call while another command makes the step: it says so once, and raises on a stop."""
        to_say = [f"another command is making step {step.name}; waiting for it"]

        def look() -> None:
            if self.stop.requested:
                raise Killed(f"step {step.name} was stopped by {self.stop.by}")
            while to_say:
                self.say(to_say.pop())

        return look

    def _build(self, status: StepStatus, key: ContentKey, folder: Path) -> None:
        """Run a step in a temporary folder, and move it to ``folder`` with its step.json. The caller holds the lock."""
        step, root = status.step, self.graph.root
        building = Path(tempfile.mkdtemp(prefix=temporary_prefix(f".{folder.name}"), dir=folder.parent))
        try:
            building.chmod(0o755)  # mkdtemp's 0700 would hide the outputs from a team
            out = building / step_folders.OUT
            out.mkdir()
            program = StepProgram(
                step=step,
                root=root,
                out=out,
                inputs=status.inputs,
                log=step_folders.log_of(folder),
                stop=self.stop,
                say=self.say,
            )
            inputs = [os.path.realpath(path) for group in status.inputs for path in group]
            # hashed before the program starts, so that an edit while it runs is noticed
            keyed = {**dict.fromkeys(inputs, ""), **_code(step, root)}
            self.say(f"step {step.name}: {', '.join(status.reasons)}")
            began_at = time.time()
            end = self._run(program)
            self._refuse_changed(step, key)
            files = step_folders.digests(out)
            duration_s = round(time.time() - began_at, 3)
            self._refuse_edited(end.notes, step, keyed)
            bash_variables = step.args if isinstance(step.command, str) else ()
            given_variables = {*step.env, *bash_variables, "out", "PYTHONPATH"}
            reads = stored_record(record_inputs(end.notes, root, keyed, inputs), given_variables)
            self._warn_of_files(program, [*reads["files"]])
            record = StepRecord(
                name=step.name,
                key=key.short,
                digest=key.digest,
                **vars(StepVersion.of(step, key)),
                files=files,
                dependencies={**reads, "nodes": [end.executable]},  # another executable makes the step out of date
                duration_s=duration_s,
                unix_time=time.time(),
            )
            write_json(building / step_folders.RECORD, vars(record))
            shutil.copyfile(program.log, building / step_folders.LOG)
            _put_in_place(building, folder)
            program.log.unlink(missing_ok=True)
            self.made.append(step.name)
            self.say(f"made step {step.name} in {time.time() - began_at:.1f} s; {shown(folder, root)}")
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _run(self, program: StepProgram) -> ProgramEnd:
        """Run the program and check its outputs. Raises PacelineError."""
        step = program.step
        program.log.write_bytes(b"")  # the log of an earlier failure
        end = program.run()
        if self.stop.requested:
            raise Killed(f"step {step.name} was stopped by {self.stop.by}; {CTRL_C.partition('; ')[2]}")
        if end.exit_code != 0:
            signal = f" (signal {end.exit_code - 128})" if end.exit_code > 128 else ""
            raise PacelineError(
                f"step {step.name} ended with exit code {end.exit_code}{signal}; nothing of it is kept but "
                f"{shown(program.log, program.root)}{_last_lines(program.log)}",
                hint="fix it, then the same command",
            )
        _check_outputs(program)
        return end

    def _warn_of_files(self, program: StepProgram, files: Sequence[str]) -> None:
        """Warn of files that the step read and its inputs don't list."""
        if not files:
            return
        was, them = ("was", "it") if len(files) == 1 else ("were", "them")
        # show an output of another step as inputs name it: step:clean/a.csv, not runs/steps/clean-0b1c…/out/a.csv
        steps = f"{shown(step_folders.steps_dir(self.graph.runs_dir), program.root)}/"
        names = [re.sub(rf"^{re.escape(steps)}(.+)-[0-9a-f]+/out/", rf"{PREFIX}\1/", name) for name in files]
        program.warn(
            f"the key of step {program.step.name} is not complete: {joined(names)} {was} read; add {them} to its inputs"
        )

    def _refuse_changed(self, step: Step, key: ContentKey) -> None:
        """Raise PacelineError if the step's key has changed while it ran."""
        key_now = self.graph.fresh_key(step)
        if key_now.digest != key.digest:
            changes = "; ".join(changed(StepVersion.of(step, key), StepVersion.of(step, key_now)))
            raise PacelineError(f"while step {step.name} was made: {changes}", hint="the same command again")

    def _refuse_edited(self, notes: Notes, step: Step, keyed: Mapping[str, str]) -> None:
        """Raise PacelineError if a file of the key had other content when the step opened it (an edit since undone)."""
        if edited := files_changed_meanwhile(notes, self.graph.root, keyed):
            raise PacelineError(
                f"step {step.name} read {joined(edited)} with another content than its key holds: somebody edits it",
                hint="the same command again",
            )


def _check_outputs(program: StepProgram) -> None:
    step, out = program.step, program.out
    paths = [*out.rglob("*")]
    if links := [path for path in paths if path.is_symlink()]:
        raise PacelineError(
            f"step {step.name} left a link, {links[0].relative_to(out)}: what it leads to may change",
            hint="let it write the file itself",
        )
    if missing := [item for item in step.outputs if not _holds_file(out, item)]:
        files = sorted(path.relative_to(out).as_posix() for path in paths if path.is_file())
        raise PacelineError(
            f"step {step.name} ended with exit code 0 without its outputs {', '.join(missing)}; in its folder "
            f"{{out}} it left {', '.join(files[:5]) or 'nothing'}{_last_lines(program.log)}",
            hint="let it write them into that folder",
        )


def _holds_file(out: Path, item: str) -> bool:
    paths = [out / item] if (out / item).exists() else [*out.glob(item)]  # x[1].txt may be a literal name
    return any(path.is_file() or any(inner.is_file() for inner in path.rglob("*")) for path in paths)


def _code(step: Step, root: Path) -> dict[str, str]:
    """Return real path → sha256 of the code that the step runs."""
    paths = [*sources_of(step, root).values(), *(root / name for name in _CALLER if (root / name).is_file())]
    return {os.path.realpath(path): sha256_file(path) for path in paths}


def _put_in_place(building: Path, folder: Path) -> None:
    """Move the folder into place with one rename. An older folder there, which was altered, is removed."""
    for path in [*building.rglob("*"), building]:
        if path.is_file() or path.is_dir():
            fsync(path)
    replaced = building.with_name(f"{building.name}x")
    if folder.exists():  # altered, or without step.json
        folder.rename(replaced)
    building.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    fsync(folder.parent)


def _last_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")[-_END_CHARACTERS:]
    lines = text.rstrip().splitlines()[-_END_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


# ----------------------------------------------------------------------- steps as sources of a run's data
@dataclass(frozen=True, kw_only=True)
class DataStep:
    """A step whose output is the data of a run (``dataset.source=step:NAME`` or an argument of a script)."""

    name: str
    inside: str  # path in the folder of the outputs; '': the single file, or the whole folder
    graph: Graph

    @property
    def path(self) -> Path | None:
        """The path of the output; None while the step must run. Raises UsageError: the step is invalid."""
        status = self.graph.status(self.name)
        if status.made is None:
            return None
        return step_folders.output_path(status.step, status.made, self.inside)

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Run the step and the steps that it needs; return how many were run. Raises PacelineError."""
        return make_all(self.graph, [self.name], say, at_once=at_once)

    def states(self) -> list[StepState]:
        """Return the states of the step and all steps that it needs, in order. Raises UsageError."""
        return [self._state(name) for name in self.graph.order([self.name])]

    def _state(self, name: str) -> StepState:
        status = self.graph.status(name)
        why = status.made.folder.name if status.made is not None else "; ".join(status.reasons)
        return StepState(name=name, made=status.made is not None, why=why, needs=status.step.upstream)


def data_step(text: str, composed: Mapping[str, Any], root: Path) -> DataStep:
    """Return the step named by ``step:NAME``. Raises UsageError."""
    name, inside = split_source(text)
    graph = graph_of(composed, root)
    graph.step(name)
    return DataStep(name=name, inside=inside, graph=graph)


def graph_of(composed: Mapping[str, Any], root: Path) -> Graph:
    """Return the graph of all steps for a resolved configuration. Raises UsageError."""
    runs_dir = root / expanded(str(composed["paths"]["runs"]), "paths.runs")
    return Graph(composed, root=root, runs_dir=runs_dir)
