"""The dependency graph of steps: their order, whether each is up to date, and which old outputs nothing needs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pipeline.config.own_targets import check_step
from pipeline.core.errors import DataError, UsageError, os_reason
from pipeline.core.files import expanded, fingerprints
from pipeline.core.locks import FileLock
from pipeline.core.places import shown
from pipeline.data import trees
from pipeline.data.manifest import STAMPS, origin_of
from pipeline.data.sources.source import walked
from pipeline.keys.content_key import ContentKey
from pipeline.steps import step, step_folders
from pipeline.steps.key import StepVersion, changed, step_key
from pipeline.steps.step import PREFIX, Step, StepError, split_source
from pipeline.steps.step_folders import MadeStep, StepRecord

_FOLDER = re.compile(r".+-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """The state of a step: up to date, or why it must run."""

    step: Step
    key: ContentKey | None  # None: a step that it needs must run first
    made: MadeStep | None  # None: it must run
    reasons: tuple[str, ...] = ()  # to run it
    inputs: tuple[tuple[Path, ...], ...] = ()  # the files of each entry of step.inputs


class Graph:
    """The steps of one resolved configuration (``composed``), each loaded on first use."""

    def __init__(self, composed: Mapping[str, Any], *, root: Path, runs_dir: Path) -> None:
        self.composed, self.root, self.runs_dir = composed, root, runs_dir
        self._steps: dict[str, Step] = {}
        self._statuses: dict[str, StepStatus] = {}

    def names(self) -> list[str]:
        """Return all steps. Raises StepError."""
        return step.names(self.root)

    def step(self, name: str) -> Step:
        """Return a step. Raises StepError, UsageError."""
        if name not in self._steps:
            self._steps[name] = step.load(name, self.composed, self.root)
        return self._steps[name]

    def order(self, names: Iterable[str]) -> list[str]:
        """Return these steps and all that they need, in topological order. Raises StepError: a cycle."""
        needs: dict[str, tuple[str, ...]] = {}
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name not in needs:
                needs[name] = self.step(name).upstream
                waiting += needs[name]
        try:
            return [*TopologicalSorter(needs).static_order()]
        except CycleError as error:
            circle = " → ".join(reversed(error.args[1]))
            hint = "take one of these out of the other's inputs"
            raise StepError(f"steps need each other: {circle}", hint=hint) from error

    def status(self, name: str) -> StepStatus:
        """Return the state of a step. Raises StepError, UsageError."""
        status = self._statuses.get(name)
        if status is None:
            self.order([name])  # refuses a cycle, which would be an endless recursion
            status = self._statuses[name] = self._find_status(self.step(name))
        return status  # not self._statuses[name]: another thread may have called forget()

    def forget(self) -> None:
        """Drop the cached states, after a step was run."""
        self._statuses.clear()

    def _find_status(self, step: Step) -> StepStatus:
        if step.function:
            check_step(f"step.{step.name}", step.function, step.args, self.root)
        missing = [name for name in step.upstream if self.status(name).made is None]
        available = (item for item in step.inputs if not (item.startswith(PREFIX) and split_source(item)[0] in missing))
        # also if the step can't run yet, so that a missing input is reported before other steps run
        groups = [self._files(step, item) for item in available]
        if missing:
            return StepStatus(step=step, key=None, made=None, reasons=tuple(f"after step {name}" for name in missing))
        key = self._key(step, groups)
        made, damage = step_folders.find_made(step_folders.folder_of(self.runs_dir, step, key), key, self.root)
        reasons: tuple[str, ...] = ()
        if made is None:
            reasons = (damage,) if damage else self._reasons(step, key)
        files = tuple(tuple(path for _, path in group) for group in groups)
        return StepStatus(step=step, key=key, made=made, reasons=reasons, inputs=files)

    def _key(self, step: Step, groups: list[list[tuple[str, Path]]]) -> ContentKey:
        """Return the step's key. ``groups``: ``_files`` of each entry of its inputs. Raises StepError, UsageError."""
        labels = {label: path for group in groups for label, path in group}
        paths = [*dict.fromkeys(labels.values())]
        try:
            fingerprint_by_path = fingerprints(paths, step_folders.steps_dir(self.runs_dir))
        except OSError as error:
            raise StepError(f"step {step.name}: an input can't be read: {os_reason(error)}") from error
        except DataError as error:
            raise StepError(f"step {step.name}: {error.what}", hint=error.hint) from error
        return step_key(step, {label: fingerprint_by_path[path].sha256 for label, path in labels.items()}, self.root)

    def fresh_key(self, step: Step) -> ContentKey:
        """Return the key for the current files, for a step that has just been run. Raises StepError, UsageError."""
        return self._key(step, [self._files(step, item) for item in step.inputs])

    def _files(self, step: Step, item: str) -> list[tuple[str, Path]]:
        """Return (label in the key, path) of each file of an entry of ``step.inputs``. Raises StepError."""
        if item.startswith(PREFIX):
            name, inside = split_source(item)
            made = self.status(name).made
            if made is None:  # its outputs were altered while this step used them
                raise StepError(f"step {step.name}: step {name} isn't made any more", hint="the same command again")
            return step_folders.output_files(self.step(name), made, inside)
        try:
            self._refuse_steps_dir(step, item)
            paths = _files_matching(item, self.root)
        except OSError as error:  # a name too long, or an unreadable folder
            raise StepError(f"step {step.name}: inputs: {item!r} can't be read: {os_reason(error)}") from error
        if not paths:
            raise StepError(
                f"step {step.name}: inputs: {item!r} matches no file in {self.root}",
                hint=f"doit step lists the steps; a file that a step makes is written {PREFIX}NAME/{Path(item).name}",
            )
        return [(shown(path, self.root), path) for path in paths]

    def _refuse_steps_dir(self, step: Step, item: str) -> None:
        """Refuse an entry that contains the folder of steps, which changes with every step. Raises StepError."""
        steps_dir = step_folders.steps_dir(self.runs_dir)
        for path in _paths_matching(item, self.root):
            if steps_dir.is_relative_to(path) or path.is_relative_to(steps_dir):
                raise StepError(
                    f"step {step.name}: inputs: {item!r} holds {steps_dir}, where steps are made: it would be another "
                    "input each time",
                    hint=f"name folders or files beside it; outputs of a step are {PREFIX}NAME/FILE",
                )

    def _reasons(self, step: Step, key: ContentKey) -> tuple[str, ...]:
        """Return what differs from the most similar earlier version of the step."""
        earlier = [record for _, record in step_folders.earlier_versions(self.runs_dir, step.name)]
        if not earlier:
            return ("never made",)
        version_now = StepVersion.of(step, key)
        fewest = min((changed(record, version_now) for record in earlier), key=len)
        return tuple(fewest) or ("its parts are the same, but not its key",)


def _paths_matching(pattern: str, root: Path) -> list[Path]:
    path = expanded(pattern, f"inputs: {pattern}")
    if path.is_absolute():  # glob needs a relative pattern
        anchor, rest = Path(path.anchor), path.relative_to(path.anchor)
    else:
        anchor, rest = root, path
    # x[1].txt may be a literal name
    return [anchor / rest] if (anchor / rest).exists() else sorted(anchor.glob(str(rest)))


def _files_matching(pattern: str, root: Path) -> list[Path]:
    paths = _paths_matching(pattern, root)
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(walked(path)))]
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


# ---------------------------------------------------------------- what nothing needs any more
def find_unneeded(graph: Graph, data_dir: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Return the folders and logs of steps that can go, and the folders that must stay, both as path → reason.

    A folder stays if its step is up to date, or if a data pack, a script's data or a folder that stays was made of it.
    """
    steps = step_folders.steps_dir(graph.runs_dir)
    names = {path.parent.name.rpartition("-")[0] for path in steps.glob(f"[!.]*/{step_folders.RECORD}")}
    made = {path: record for name in names for path, record in step_folders.earlier_versions(graph.runs_dir, name)}
    origins = _data_origins(data_dir)
    staying: dict[Path, str] = {}
    for path, record in made.items():
        is_packed = any(origin.is_relative_to(path) for origin in origins)
        if reason := _reason_to_stay(graph, path, record, is_packed):
            staying[path] = reason
    # A folder that stays keeps the folders it was made from, so repeat until nothing is added.
    while more := {path: why for path in made if path not in staying and (why := _needed_by(path, made, staying))}:
        staying |= more
    going = {path: "nothing needs it" for path in made if path not in staying}
    # `made` has only folders with a valid step.json
    folders = (path for path in sorted(steps.glob("*")) if _FOLDER.fullmatch(path.name) and path.is_dir())
    going |= {path: "its step.json is gone or damaged" for path in folders if step_folders.read_record(path) is None}
    in_progress = {path for path, _ in step_folders.logs_in_progress(graph.runs_dir)}
    logs = (path for path in sorted(steps.glob("*.log")) if _FOLDER.fullmatch(path.stem) and path not in in_progress)
    return going | dict.fromkeys(logs, "the log of a failed step"), staying


def remove(path: Path) -> bool:
    """Remove a folder or a log; False if a command is using it. Raises OSError."""
    lock = FileLock(step_folders.lock_of(path.with_suffix("")))
    if not lock.take():
        return False
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        lock.path.unlink(missing_ok=True)
    finally:
        lock.release()
    return True


def _data_origins(data_dir: Path) -> list[Path]:
    """Return the paths that the data packs and the scripts' data in ``data_dir`` were made from."""
    origins = (origin_of(path.parent) for path in data_dir.glob(f"*/{STAMPS}"))
    return [*(origin for origin in origins if origin is not None), *trees.sources(data_dir)]


def _reason_to_stay(graph: Graph, path: Path, record: StepRecord, is_packed: bool) -> str:
    if is_packed:
        return "a data pack was made of it"
    if record.name not in graph.names():
        return ""
    try:
        status = graph.status(record.name)
    except UsageError:
        return "it can't be told whether it is up to date: doit step"
    if status.key is None:
        return f"it can't be told whether it is up to date: {status.reasons[0]}"
    return "it is up to date" if step_folders.folder_of(graph.runs_dir, status.step, status.key) == path else ""


def _needed_by(path: Path, made: Mapping[Path, StepRecord], staying: Iterable[Path]) -> str:
    """Return the reason if a folder that stays was made of an output of ``path``; else ''."""
    outputs = {f"{PREFIX}{made[path].name}/{name}": sha256 for name, sha256 in made[path].files.items()}
    for other in staying:
        if any(outputs.get(label) == sha256 for label, sha256 in made[other].inputs.items()):
            return f"{other.name} was made of it"
    return ""
