"""The folders of steps that were run, ``runs/steps/NAME-KEY/``: outputs in ``out/``, ``step.json`` and ``log.txt``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.config.step_source import named_step
from pipeline.core import documents, locks
from pipeline.core.errors import DataError, UsageError, os_reason, suggestion
from pipeline.core.files import fingerprint, fingerprints
from pipeline.data.manifest import origin_of
from pipeline.data.request import reads_changed
from pipeline.keys.content_key import ContentKey
from pipeline.runs.folder import RunFolder
from pipeline.steps.key import StepVersion
from pipeline.steps.step import PREFIX, Step, StepError, split_source

FOLDER = "steps"
OUT = "out"
RECORD = "step.json"
LOG = "log.txt"


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepVersion):
    """The content of step.json. The field names are those in the file."""

    name: str
    key: str = ""  # short form of ``digest``
    digest: str  # of the step's key
    files: Mapping[str, str]  # the sha256 of each output by its path in ``out``
    dependencies: Mapping[str, Any]  # what the step read besides its key, in the format of ``stored_record``
    duration_s: float = 0.0
    unix_time: float = 0.0

    @property
    def inputs(self) -> Mapping[str, str]:
        """Name of each input, such as ``step:clean/images.npz`` → sha256."""
        return self.parts.get("data") or {}


@dataclass(frozen=True, kw_only=True)
class MadeStep:
    """A step with intact outputs."""

    folder: Path
    record: StepRecord

    @property
    def out(self) -> Path:
        return self.folder / OUT


def folder_of(runs_dir: Path, step: Step, key: ContentKey) -> Path:
    """Return the folder of a step with this key."""
    return steps_dir(runs_dir) / f"{step.name}-{key.short}"


def steps_dir(runs_dir: Path) -> Path:
    return runs_dir.absolute() / FOLDER


def log_of(folder: Path) -> Path:
    """Return the log of a step in progress or failed. It lies next to the folder, which doesn't exist yet."""
    return folder.with_name(f"{folder.name}.log")


def lock_of(folder: Path) -> Path:
    """Return the lock that a command holds while it runs the step."""
    return folder.parent / f".{folder.name}.lock"


def logs_in_progress(runs_dir: Path) -> list[tuple[Path, float]]:
    """Return the logs of all steps in progress, each with its last modification time."""
    logs = []
    for path in sorted(steps_dir(runs_dir).glob("*.log")):
        with suppress(FileNotFoundError):  # the step has just finished
            if locks.is_held(lock_of(path.with_suffix(""))):
                logs.append((path, path.stat().st_mtime))
    return logs


def read_record(folder: Path) -> StepRecord | None:
    """Return the content of step.json; None if missing or unreadable."""
    document = documents.read_or_empty(folder / RECORD)
    if not isinstance(document.get("files"), dict):
        return None
    return StepRecord(
        name=str(document.get("name")),
        digest=str(document.get("digest")),
        parts=document.get("parts") or {},
        written=document.get("written") or {},
        parameters=document.get("parameters") or {},
        files=document["files"],
        dependencies=document.get("dependencies") or {},
    )


def find_made(folder: Path, key: ContentKey, root: Path) -> tuple[MadeStep | None, str]:
    """Return the step if its outputs are intact, else None and the reason. Hashes only files with changed stamps."""
    record = read_record(folder)
    if record is None:
        return None, ("its step.json is gone or damaged" if folder.exists() else "")
    if record.digest != key.digest:
        return None, "its step.json is of another key"
    try:
        files = cached_digests(folder / OUT, folder.parent)
    except (OSError, DataError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        return None, f"its outputs can't be read: {reason}"
    for name in sorted({*record.files, *files}):
        if record.files.get(name) != files.get(name):
            change = "is gone" if name not in files else "was added" if name not in record.files else "was altered"
            return None, f"its output {name} {change}"
    # what the step read besides the files of its key
    changed_read = reads_changed(record.dependencies, root, key.parts["environment"])
    if changed_read is not None:
        return None, changed_read
    return MadeStep(folder=folder, record=record), ""


def cached_digests(out: Path, cache_folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below ``out``, with a cache in ``cache_folder``. Raises OSError, DataError."""
    fingerprint_by_path = fingerprints(_files(out), cache_folder)
    return {path.relative_to(out).as_posix(): found.sha256 for path, found in fingerprint_by_path.items()}


def digests(out: Path) -> dict[str, str]:
    """Return the same as ``cached_digests``, without the cache: for a folder that will be renamed."""
    return {path.relative_to(out).as_posix(): fingerprint(path).sha256 for path in _files(out)}


def _files(out: Path) -> list[Path]:
    return [path for path in sorted(out.rglob("*")) if path.is_file()]


def output_files(step: Step, made: MadeStep, path: str) -> list[tuple[str, Path]]:
    """Return name and path of each file of ``step:NAME/path``; without a path, of all files. Raises StepError."""
    names = made.record.files
    # the path names a file, or a folder; otherwise it is a pattern
    chosen = [name for name in names if not path or name == path or name.startswith(f"{path.rstrip('/')}/")]
    chosen = chosen or [name for name in names if fnmatchcase(name, path)]
    if not chosen:
        raise _no_such_output(step, made, path)
    return [(f"{PREFIX}{step.name}/{name}", made.out / name) for name in sorted(chosen)]


def output_path(step: Step, made: MadeStep, path: str) -> Path:
    """Return the file or folder of ``step:NAME/path`` as the source of a run's data. Raises StepError."""
    if path:
        if not (made.out / path).exists():
            raise _no_such_output(step, made, path)
        return made.out / path
    return made.out / next(iter(made.record.files)) if len(made.record.files) == 1 else made.out


def _no_such_output(step: Step, made: MadeStep, path: str) -> StepError:
    return StepError(f"{PREFIX}{step.name}/{path}: the step has no such output; {suggestion(path, made.record.files)}")


def earlier_versions(runs_dir: Path, name: str) -> list[tuple[Path, StepRecord]]:
    """Return the folders of a step's earlier versions, with any key, and their step.json."""
    records = [(path, read_record(path)) for path in sorted(steps_dir(runs_dir).glob(f"{name}-*"))]
    return [(path, record) for path, record in records if record is not None and record.name == name]


# --------------------------------------------------------------- where the data of an earlier run came from
@dataclass(frozen=True, kw_only=True)
class PastStep:
    """A step as it was when an earlier run used it."""

    name: str
    key: str = ""  # '': unknown
    needs: tuple[PastStep, ...] = ()  # the steps before it

    def __str__(self) -> str:
        before = f" ({', '.join(map(str, self.needs))} before it)" if self.needs else ""
        return f"step {self.name} {self.key}".rstrip() + before


def past_step(folder: RunFolder, config: Mapping[str, Any]) -> PastStep | None:
    """Return the step that the run's data came from, or None. ``config`` is the content of its config.json."""
    runs_dir = folder.path.parent
    with suppress(UsageError, AttributeError):  # a damaged config.json
        source = named_step(config)
        if source is None:
            return None
        name, _ = split_source(source.text)
        step_folder = _folder_of_origin(folder.path / "data", runs_dir, name)
        return PastStep(name=name) if step_folder is None else _past(name, step_folder, runs_dir)
    return None


def _folder_of_origin(pack: Path, runs_dir: Path, name: str) -> Path | None:
    """Return the folder of the step ``name`` from whose output a pack was made, or None."""
    origin, steps = origin_of(pack), steps_dir(runs_dir)
    if origin is None or steps not in origin.parents:
        return None
    folder = steps / origin.relative_to(steps).parts[0]
    return folder if folder.name.rpartition("-")[0] == name else None


def _past(name: str, folder: Path, runs_dir: Path) -> PastStep:
    return PastStep(name=name, key=folder.name.rpartition("-")[2], needs=tuple(_steps_before(folder, runs_dir)))


def _steps_before(folder: Path, runs_dir: Path) -> Iterator[PastStep]:
    """Yield the steps whose outputs a step read, in the versions that have exactly these files."""
    record = read_record(folder)
    files_by_step: dict[str, dict[str, str]] = {}  # step → path of an output → sha256
    for label, sha256 in (record.inputs if record is not None else {}).items():
        if label.startswith(PREFIX):
            name, inside = split_source(label)
            files_by_step.setdefault(name, {})[inside] = sha256
    for name, files in files_by_step.items():
        versions = earlier_versions(runs_dir, name)
        folders = (path for path, version in versions if files.items() <= version.files.items())
        past = next(folders, None)
        yield PastStep(name=name) if past is None else _past(name, past, runs_dir)
