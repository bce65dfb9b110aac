"""Make steps that aren't up to date: each once, in a temporary folder that is renamed into place."""

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
from pipeline.steps.graph import Graph, StepStanding
from pipeline.steps.key import StepVersion, changed, sources_of
from pipeline.steps.step import PREFIX, Say, Step, split_source
from pipeline.steps.step_folders import StepRecord
from pipeline.steps.step_program import ProgramEnd, StepProgram
from trainers.observation.input_record import files_changed_meanwhile, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.unkeyed import joined

_END_LINES, _END_CHARACTERS = 12, 4000
_LOOK_S = 0.1
_CALLER = ("trainers/__init__.py", "trainers/call.py")  # the code that calls functions


def make_all(graph: Graph, names: Iterable[str], say: Say, *, at_once: int = 1) -> int:
    """Run these steps and those they need, ``at_once`` of them; return their number.

    Raises StepError, PacelineError, Killed.
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
                maker = _Maker(graph, say, stop)
                _run_in_order(graph, todo, maker, max(1, at_once))
            finally:
                signals.hold()
                signals.left = f"; {CTRL_C.partition('; ')[2]}"
    finally:
        graph.forget()
    return len(maker.made)


def _run_in_order(graph: Graph, todo: Collection[str], maker: _Maker, at_once: int) -> None:
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
                    running[pool.submit(maker.make, standing)] = ready.popleft()
                for future in wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                    future.result()
                    order.done(running.pop(future))
        except BaseException as error:  # the pool then waits until the other programs have ended
            maker.stop.request("another step's failure" if isinstance(error, Exception) else "a signal")
            raise


class _Maker:
    def __init__(self, graph: Graph, say: Say, stop: Stop) -> None:
        self.graph, self.say, self.stop = graph, say, stop
        self.made: list[str] = []

    def make(self, standing: StepStanding) -> None:
        """Run one step whose inputs all exist. Raises PacelineError."""
        step, key = standing.step, standing.key
        if standing.made is not None:
            return
        assert key is not None, "it is started when all that it needs is made"
        folder = step_folders.folder_of(self.graph.runs_dir, step, key)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with held(step_folders.lock_of(folder), meanwhile=self._waiting_for_another(step)):
                made, _ = step_folders.find_made(folder, key, self.graph.root)
                if made is not None:
                    shown_folder = shown(folder, self.graph.root)
                    self.say(f"step {step.name} was made by another command meanwhile; {shown_folder}")
                    return
                remove_leftovers([folder.parent])
                self._build(standing, key, folder)
        except OSError as error:
            raise PacelineError(
                f"step {step.name} can't be kept in {folder.parent}: {os_reason(error)}",
                hint=write_hint(error, self.graph.runs_dir),
            ) from error

    def _waiting_for_another(self, step: Step) -> Callable[[], None]:
        """Return what is called while another command makes the step: it says so once, and ends the wait on a stop."""
        unsaid = [f"another command is making step {step.name}; waiting for it"]

        def look() -> None:
            if self.stop.requested:
                raise Killed(f"step {step.name} was stopped by {self.stop.by}")
            while unsaid:
                self.say(unsaid.pop())

        return look

    def _build(self, standing: StepStanding, key: ContentKey, folder: Path) -> None:
        step, root = standing.step, self.graph.root
        building = Path(tempfile.mkdtemp(prefix=temporary_prefix(f".{folder.name}"), dir=folder.parent))
        try:
            building.chmod(0o755)
            out = building / step_folders.OUT
            out.mkdir()
            program = StepProgram(
                step=step,
                root=root,
                out=out,
                inputs=standing.inputs,
                log=step_folders.log_of(folder),
                stop=self.stop,
                say=self.say,
            )
            inputs = [os.path.realpath(path) for group in standing.inputs for path in group]
            keyed = {**dict.fromkeys(inputs, ""), **_code(step, root)}
            self.say(f"step {step.name}: {', '.join(standing.why)}")
            begun = time.time()
            end = self._run(program)
            self._refuse_changed(step, key)
            files = step_folders.digests(out)
            duration_s = round(time.time() - begun, 3)
            self._refuse_read(end.notes, step, keyed)
            given = {*step.env, *(step.args if isinstance(step.command, str) else ()), "out", "PYTHONPATH"}
            reads = stored_record(record_inputs(end.notes, root, keyed, inputs), given)
            self._warn_of_files(program, [*reads["files"]])
            record = StepRecord(
                name=step.name,
                key=key.short,
                digest=key.digest,
                **vars(StepVersion.of(step, key)),
                files=files,
                dependencies={**reads, "nodes": [end.executable]},  # it counts without being listed as an input
                duration_s=duration_s,
                unix_time=time.time(),
            )
            write_json(building / step_folders.RECORD, vars(record))
            shutil.copyfile(program.log, building / step_folders.LOG)
            _put_in_place(building, folder)
            program.log.unlink(missing_ok=True)
            self.made.append(step.name)
            self.say(f"made step {step.name} in {time.time() - begun:.1f} s; {shown(folder, root)}")
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _run(self, program: StepProgram) -> ProgramEnd:
        """Run the program and check its outputs. Raises PacelineError."""
        step = program.step
        with program.log.open("w", encoding="utf-8"):
            pass
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
        if not files:
            return
        was, them = ("was", "it") if len(files) == 1 else ("were", "them")
        steps = f"{shown(step_folders.steps_dir(self.graph.runs_dir), program.root)}/"
        names = [re.sub(rf"^{re.escape(steps)}(.+)-[0-9a-f]+/out/", rf"{PREFIX}\1/", name) for name in files]
        program.warn(
            f"the key of step {program.step.name} is not complete: {joined(names)} {was} read; add {them} to its inputs"
        )

    def _refuse_changed(self, step: Step, key: ContentKey) -> None:
        now = self.graph.fresh_key(step)
        if now.digest != key.digest:
            changes = "; ".join(changed(StepVersion.of(step, key), StepVersion.of(step, now)))
            raise PacelineError(f"while step {step.name} was made: {changes}", hint="the same command again")

    def _refuse_read(self, notes: Notes, step: Step, keyed: Mapping[str, str]) -> None:
        """Raise PacelineError if a file of the key had other content when the step opened it."""
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
    paths = [*sources_of(step, root).values(), *(root / name for name in _CALLER if (root / name).is_file())]
    return {os.path.realpath(path): sha256_file(path) for path in paths}


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


def _last_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")[-_END_CHARACTERS:]
    lines = text.rstrip().splitlines()[-_END_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


# ----------------------------------------------------------------------- steps as sources of a run's data
@dataclass(frozen=True, kw_only=True)
class DataStep:
    """The step ``name`` of ``graph``; ``inside`` is the path in its folder, '' for its single file or all of it."""

    name: str
    inside: str
    graph: Graph

    @property
    def path(self) -> Path | None:
        """The path of its output; None while it must run. Raises UsageError: the step is invalid."""
        standing = self.graph.standing(self.name)
        if standing.made is None:
            return None
        return step_folders.output_path(standing.step, standing.made, self.inside)

    def make(self, say: Callable[[str], None], at_once: int = 1) -> int:
        """Run it and the steps it needs; return how many were run. Raises PacelineError."""
        return make_all(self.graph, [self.name], say, at_once=at_once)

    def standings(self) -> list[StepState]:
        """Return the states of it and all steps it needs, in order. Raises UsageError."""
        return [self._state(name) for name in self.graph.order([self.name])]

    def _state(self, name: str) -> StepState:
        standing = self.graph.standing(name)
        where = standing.made.folder.name if standing.made is not None else "; ".join(standing.why)
        return StepState(name=name, made=standing.made is not None, why=where, needs=standing.step.upstream)


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
