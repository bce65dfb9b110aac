"""Checkpoints in the run folder, read without torch, and their copies in the mirror, an object store at the address
``cluster.checkpoint_mirror``, from which a lost run folder gets them back.

A checkpoint of the classifier is a file step-N.pt with metadata (sha256, step, rows of metrics.jsonl) in step-N.json;
trainers/checkpoint.py writes both. A script's checkpoints are any files in its folder for checkpoints."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core import documents
from pipeline.core import program as programs
from pipeline.core.errors import DataError
from pipeline.core.files import Stamp, sha256_file, stamp, temporary_prefix, write_atomic
from pipeline.data.sources.source import ObjectStore
from pipeline.runs import journal
from pipeline.runs.metrics_file import bad_lines
from trainers.contract import run_folder
from trainers.contract.seal import digest_of
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig

if TYPE_CHECKING:
    from pipeline.runs.script_attempts import ScriptAttempts

READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a damaged checkpoint or its metadata may raise."""


def cut_to_newest_checkpoint(run_dir: Path) -> Iterator[str]:
    """Set damaged checkpoints aside, and reset metrics.jsonl to the rows that the newest intact one contains.

    The trainer does the same on its node, so both copies stay equal. Yields warnings about damage. Raises OSError."""
    # a script may not log its rows again after a resume: trainers.script.metrics decides which ones stay
    if not programs.of_run(run_dir).is_ours:
        return
    metrics_text = ""
    for path in sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), reverse=True):
        try:
            metrics_text = read_verified(path)["metrics"]
            break
        except READ_ERRORS as error:
            yield f"checkpoint {path.name} is skipped: {error}"
            set_aside(path)
    path = run_dir / run_folder.METRICS
    if path.exists():
        damaged = bad_lines(path)
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            yield f"{path.name}: line {damaged[0]}{more} was damaged; all that the checkpoint knows is there again"
        if path.read_bytes() == metrics_text.encode():
            return
    write_atomic(path, metrics_text)


def settings_of(run_dir: Path) -> ScriptConfig | None:
    """Return the settings of a script's run; None for the classifier."""
    section = documents.read_or_empty(run_dir / run_folder.CONFIG).get(programs.SECTION) or {}
    try:
        return ScriptConfig(**section)
    except (ConfigError, TypeError):
        return None


def script_attempts(run_dir: Path, settings: ScriptConfig | None) -> ScriptAttempts | None:
    """Return the attempts of a script's run; None without ``settings``, for a run of the classifier."""
    if settings is None:
        return None
    from pipeline.runs.script_attempts import ScriptAttempts  # it loads nine modules that the classifier doesn't need

    return ScriptAttempts(run_dir, settings)


def read_verified(path: Path) -> dict[str, Any]:
    """Read a checkpoint's metadata and check its sha256. Raises READ_ERRORS: it is incomplete or altered."""
    metadata = read_metadata(path)
    sha256 = sha256_file(path)
    if sha256 != metadata["sha256"]:
        raise ValueError(f"the sha256 of {path.name} is {sha256[:12]}, {path.stem}.json says {metadata['sha256'][:12]}")
    return metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the .json of a checkpoint without checking the checkpoint itself. Raises READ_ERRORS."""
    metadata: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if metadata["digest"] != digest_of(metadata):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    return metadata


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the folder, even if it is incomplete; 0 if there is none."""
    return max(map(step_of, (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt")), default=0)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint or of its .json; 0 for another file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def set_aside(path: Path) -> None:
    """Rename a checkpoint and its metadata to ``*.bad``, so that it is ignored. Raises OSError."""
    for file in (path, path.with_suffix(".json")):
        with suppress(FileNotFoundError):
            file.replace(file.with_name(f"{file.name}.bad"))


# --------------------------------------------------------------------------------------------- mirror
SETTING = "cluster.checkpoint_mirror"
_LISTS_KEPT = 2  # the newest, and the one before it in case the newest turns out to be damaged
_LIST_NAME = re.compile(r"files-(\d{8,})\.json")
_CONTENTS = "contents"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_METADATA = re.compile(r"checkpoints/step-\d+\.json")  # without its checkpoint it is useless
_LEFT_OUT = re.compile(r"\..*\.tmp|.*\.bad")  # files that are being written, and damaged ones


class MirroredFile(NamedTuple):
    """A file in the mirror. The modification times of a script's checkpoints decide which one is the newest."""

    sha256: str
    mtime_ns: int


FileList = Mapping[str, MirroredFile]
"""Path in the run folder → file in the mirror. Each state of the run folder is one list, ``files-NUMBER.json``."""


class CheckpointMirror:
    """The copies of one run's checkpoints in the mirror: KEY/files-NUMBER.json, lists of files, and
    KEY/contents/SHA256, the files themselves, so that a file in several lists is stored once.

    ``say`` gets warnings, and a line about a restored copy."""

    def __init__(self, address: str, key: str, run_dir: Path, say: Callable[[str], None]) -> None:
        """Raises DataError: the address can't be used here."""
        self._store = ObjectStore(address, SETTING)
        self._key, self._run_dir, self._say = key, run_dir, say
        self._pushed: dict[str, tuple[Stamp, str]] = {}  # stamp and sha256 of the files in the last list
        self._failed = False  # the last write

    @property
    def shown(self) -> str:
        """The setting and the address for messages, without a password."""
        return self._store.named

    def try_writing(self) -> None:
        """Test at the start whether the mirror can be written; report a failure as ``push`` does."""
        try:
            self._store.try_writing(f"{self._key}/.try")
        except DataError as error:
            self._warn(error)

    def push(self) -> None:
        """Copy new files. A failure doesn't end the training; consecutive failures are reported once."""
        try:
            self._copy()
            self._failed = False
        except FileNotFoundError:  # replaced by a newer checkpoint meanwhile
            return
        except (DataError, OSError) as error:
            self._warn(error)

    def _warn(self, error: DataError | OSError) -> None:
        if not self._failed:
            what, hint = (error.what, error.hint) if isinstance(error, DataError) else (error, None)
            self._say(f"WARNING: {what}; the training goes on without the mirror, which is tried again")
            if hint is not None:
                self._say(f"  try: {hint}")
        self._failed = True

    def _copy(self) -> None:
        """Copy new contents, then a list of all files; remove what only older lists name. Raises DataError, OSError.
        The list comes last: a controller that dies before leaves the mirror as it was, with a few unused contents."""
        stamps = {name: stamp(path) for name, path in _files(self._run_dir).items()}
        unchanged = stamps == {name: pushed_stamp for name, (pushed_stamp, _) in self._pushed.items()}
        if unchanged or not _holds_checkpoint(stamps):
            return
        names = self._lists()
        # lists may also be of another command, on another computer, that trained this key before
        lists: dict[str, FileList] = {}
        for name in names:
            with suppress(documents.DamagedError, *READ_ERRORS):
                lists[name] = self._read(name)
        pushed = self._copy_contents(stamps, _contents(lists.values()))
        files = {name: MirroredFile(sha256, file_stamp.mtime_ns) for name, (file_stamp, sha256) in pushed.items()}
        number = 1 + max((int(name.removeprefix("files-").removesuffix(".json")) for name in names), default=0)
        newest = f"files-{number:08d}.json"
        with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-mirror")) as folder:
            listed = {name: copied._asdict() for name, copied in files.items()}
            documents.write_sealed(Path(folder) / newest, {"files": listed})
            self._put(Path(folder) / newest, newest)
        self._pushed = pushed
        # now that the new list is complete, remove older lists, then contents that no list names any more
        kept = {name: lists[name] for name in sorted(lists)[1 - _LISTS_KEPT :]} | {newest: files}
        for name in {*names} - {*kept}:
            self._store.remove(f"{self._key}/{name}")
        for sha256 in {*self._store.names(f"{self._key}/{_CONTENTS}")} - _contents(kept.values()):
            self._store.remove(f"{self._key}/{_CONTENTS}/{sha256}")

    def _copy_contents(self, names: Iterable[str], stored: Container[str]) -> dict[str, tuple[Stamp, str]]:
        """Copy the files whose sha256 isn't ``stored``; return the stamp and sha256 of all."""
        pushed: dict[str, tuple[Stamp, str]] = {}
        for name in names:
            path, before = self._run_dir / name, self._pushed.get(name)
            file_stamp = stamp(path)
            sha256 = before[1] if before is not None and before[0] == file_stamp else sha256_file(path)
            if sha256 not in stored:
                self._put(path, f"{_CONTENTS}/{sha256}")
            if stamp(path) != file_stamp:  # the copy may be half old, half new; ``push`` waits for the next call
                raise FileNotFoundError(f"{name} was written to just now")
            pushed[name] = file_stamp, sha256
        return pushed

    def _put(self, source: Path, name: str) -> None:
        try:
            self._store.put(source, f"{self._key}/{name}")
        except DataError:  # on a full disk, a partial copy would take the room of the next one
            with suppress(DataError):
                self._store.remove(f"{self._key}/{name}")
            raise

    def _lists(self) -> list[str]:
        return sorted(name for name in self._store.names(self._key) if _LIST_NAME.fullmatch(name))

    def _read(self, name: str) -> FileList:
        with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-mirror")) as folder:
            self._store.get(f"{self._key}/{name}", Path(folder) / name)
            listed = documents.read_sealed(Path(folder) / name)["files"]
        files = {path: MirroredFile(str(raw["sha256"]), int(raw["mtime_ns"])) for path, raw in listed.items()}
        for path, copied in files.items():
            if not _is_copied(PurePosixPath(path).parts):
                raise ValueError(f"{path!r} is no file of a checkpoint")
            if not _SHA256.fullmatch(copied.sha256):
                raise ValueError(f"{path!r} has no sha256")
        return files

    def restore(self) -> None:
        """Restore the newest intact copy if the run folder has no checkpoint. Raises DataError, OSError."""
        if _holds_checkpoint(_files(self._run_dir)):
            return
        try:
            for name in reversed(self._lists()):
                if self._restore_list(name):
                    return
        except DataError as error:
            hint = "the same command when it can be reached, or cluster.checkpoint_mirror=null, which begins anew"
            raise DataError(error.what, hint=f"{error.hint}; {hint}" if error.hint else hint) from error

    def _restore_list(self, name: str) -> bool:
        """Fetch the files of a list into the run folder; False, with a warning, if one is missing or damaged."""
        prefix = temporary_prefix(".mirror")
        with tempfile.TemporaryDirectory(prefix=prefix, dir=self._run_dir, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary)
            try:
                files = self._read(name)
                for path, copied in files.items():
                    self._fetch(copied, folder / path)
            except (documents.DamagedError, *READ_ERRORS) as error:
                self._say(f"WARNING: a copy in {self.shown} is not whole and is skipped: {error}")
                return False
            # The attempts come first: once a checkpoint is here, a later call restores nothing.
            for checkpoint in folder.glob("checkpoints/step-*.pt"):
                with suppress(*READ_ERRORS):  # a script's checkpoint has no metadata
                    journal.adopt(self._run_dir, str(read_metadata(checkpoint)["attempt"]))
            for source in sorted(folder.rglob("*")):  # sorted, so a folder comes before its files
                target = self._run_dir / source.relative_to(folder)
                target.mkdir(exist_ok=True) if source.is_dir() else source.replace(target)
        step = newest_step(self._run_dir)
        taken = f"that of step {step}" if step else f"{len(files)} files that its script had left"
        self._say(f"the run folder has no checkpoint; took {taken} from {self.shown}")
        return True

    def _fetch(self, copied: MirroredFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.get(f"{self._key}/{_CONTENTS}/{copied.sha256}", target)
        sha256 = sha256_file(target)
        if sha256 != copied.sha256:
            raise ValueError(f"the sha256 of {target.name} is {sha256[:12]}, its list says {copied.sha256[:12]}")
        os.utime(target, ns=(copied.mtime_ns, copied.mtime_ns))


def _files(run_dir: Path) -> dict[str, Path]:
    """Return path in the run folder → file, for the checkpoints of all hosts and a script's metrics.jsonl."""
    folders = [run_dir / run_folder.CHECKPOINTS, *run_dir.glob(f"{run_folder.NODES}/*/{run_folder.CHECKPOINTS}")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if not _LEFT_OUT.fullmatch(path.name)]
    if not programs.of_run(run_dir).is_ours:
        paths.append(run_dir / run_folder.METRICS)
    return {path.relative_to(run_dir).as_posix(): path for path in paths if path.is_file()}


def _holds_checkpoint(names: Mapping[str, object]) -> bool:
    return any(name != run_folder.METRICS and not _METADATA.fullmatch(name) for name in names)


def _contents(lists: Iterable[FileList]) -> set[str]:
    return {copied.sha256 for files in lists for copied in files.values()}


def _is_copied(parts: tuple[str, ...]) -> bool:
    """Return True for a path that ``_files`` may return; a list that names another path is not trusted."""
    if parts == (run_folder.METRICS,):
        return True
    is_of_node = len(parts) > 3 and parts[0] == run_folder.NODES and parts[1].isdecimal()
    return len(parts) > 1 and parts[2 if is_of_node else 0] == run_folder.CHECKPOINTS and ".." not in parts
