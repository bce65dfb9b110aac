"""Checkpoints in the run folder, read without torch, and their copies at the address ``cluster.checkpoint_mirror``.
trainers/checkpoint.py, which writes them, describes the files."""

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

DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def go_on_from_checkpoint(run_dir: Path) -> Iterator[str]:
    """Set damaged checkpoints aside and cut metrics.jsonl to the lines up to the newest complete one.

    The trainer does the same on its node, so both copies stay equal to the byte. Yields warnings about damage. Raises
    OSError.
    """
    if not programs.of_run(run_dir).is_ours:  # trainers.script.metrics keeps rows that it doesn't log again
        return
    metrics_text = ""
    for path in sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), reverse=True):
        try:
            metrics_text = read_verified(path)["metrics"]
            break
        except DAMAGE as error:
            yield f"checkpoint {path.name} is skipped: {error}"
            set_aside(path)
    path = run_dir / run_folder.METRICS
    if path.exists():
        bad = bad_lines(path)
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            yield f"{path.name}: line {bad[0]}{more} was damaged; all that the checkpoint knows is there again"
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
    """Return what a script's attempts left; None (no ``settings``) for the classifier, whose runs need none of it."""
    if settings is None:
        return None
    from pipeline.runs.script_attempts import ScriptAttempts  # with nine modules that read what scripts write

    return ScriptAttempts(run_dir, settings)


def read_verified(path: Path) -> dict[str, Any]:
    """Read the .json beside a checkpoint, and check the sha256. Raises OSError and others (DAMAGE): torn or altered."""
    side = read_side(path)
    seen = sha256_file(path)
    if seen != side["sha256"]:
        raise ValueError(f"the sha256 of {path.name} is {seen[:12]}, {path.stem}.json says {side['sha256'][:12]}")
    return side


def read_side(path: Path) -> dict[str, Any]:
    """Read the .json beside a checkpoint without checking the checkpoint. Raises as ``read_verified`` does."""
    side: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if side["digest"] != digest_of(side):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    return side


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the folder, complete or not; 0 without one."""
    return max(map(step_of, (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt")), default=0)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint or of its .json; 0 for another file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def set_aside(path: Path) -> None:
    """Rename a checkpoint and its files to ``*.bad``, so that it is ignored. Raises OSError."""
    for part in (path, path.with_suffix(".json")):
        with suppress(FileNotFoundError):
            part.replace(part.with_name(f"{part.name}.bad"))


SETTING = "cluster.checkpoint_mirror"
_LISTS_KEPT = 2
_LIST_NAME = re.compile(r"files-(\d{8,})\.json")
_CONTENTS = "contents"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIDE = re.compile(r"checkpoints/step-\d+\.json")  # the description of a checkpoint, which is none by itself
_LEFT_OUT = re.compile(r"\..*\.tmp|.*\.bad")  # files that are being written, and damaged ones


class MirroredFile(NamedTuple):
    """A file in the mirror. The times of a script's checkpoints decide which one is the newest."""

    sha256: str
    mtime_ns: int


FileList = Mapping[str, MirroredFile]
"""Path in the run folder → its copy; stored as ``files-NUMBER.json``, one for each state of the run folder."""


class CheckpointMirror:
    """The copies of one run's checkpoints, in a folder named by its key: lists of files, and ``contents/SHA256``.

    ``say`` gets warnings, and a line about a restored copy.
    """

    def __init__(self, address: str, key: str, run_dir: Path, say: Callable[[str], None]) -> None:
        """Raises DataError: the address can't be used here."""
        self._store = ObjectStore(address, SETTING)
        self._key, self._run_dir, self._say = key, run_dir, say
        self._pushed: dict[str, tuple[Stamp, str]] = {}  # stamp and sha256 of the files in the last list
        self._failed = False

    @property
    def shown(self) -> str:
        """The setting and the address, without a login."""
        return self._store.named

    def try_writing(self) -> None:
        """Test at the start whether the mirror can be written; report a failure as ``push`` does."""
        try:
            self._store.try_writing(f"{self._key}/.try")
        except DataError as error:
            self._warn(error)

    def push(self) -> None:
        """Copy what is new. A failure doesn't end the training; a row of failures is reported once."""
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
        """Copy new contents, then a list of all files; remove what only older lists name. Raises DataError, OSError."""
        stamps = {name: stamp(path) for name, path in _files(self._run_dir).items()}
        if not _holds_checkpoint(stamps) or stamps == {name: seen for name, (seen, _) in self._pushed.items()}:
            return
        names = self._lists()
        lists: dict[str, FileList] = {}
        for name in names:
            with suppress(documents.DamagedError, *DAMAGE):
                lists[name] = self._read(name)
        pushed = self._copy_contents(stamps, _contents(lists.values()))
        files = {name: MirroredFile(sha256, seen.mtime_ns) for name, (seen, sha256) in pushed.items()}
        number = 1 + max((int(name[6:-5]) for name in names), default=0)
        newest = f"files-{number:08d}.json"
        with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-mirror")) as folder:
            listed = {name: copied._asdict() for name, copied in files.items()}
            documents.write_sealed(Path(folder) / newest, {"files": listed})
            self._put(Path(folder) / newest, newest)
        self._pushed = pushed
        kept = {name: lists[name] for name in sorted(lists)[1 - _LISTS_KEPT :]} | {newest: files}
        for name in {*names} - {*kept}:
            self._store.remove(f"{self._key}/{name}")
        for sha256 in {*self._store.names(f"{self._key}/{_CONTENTS}")} - _contents(kept.values()):
            self._store.remove(f"{self._key}/{_CONTENTS}/{sha256}")

    def _copy_contents(self, names: Iterable[str], stored: Container[str]) -> dict[str, tuple[Stamp, str]]:
        pushed: dict[str, tuple[Stamp, str]] = {}
        for name in names:
            path, before = self._run_dir / name, self._pushed.get(name)
            seen = stamp(path)
            sha256 = before[1] if before is not None and before[0] == seen else sha256_file(path)
            if sha256 not in stored:
                self._put(path, f"{_CONTENTS}/{sha256}")
            if stamp(path) != seen:
                raise FileNotFoundError(f"{name} was written to just now")
            pushed[name] = seen, sha256
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
        """Restore the newest whole copy if the run folder has no checkpoint. Raises DataError, OSError."""
        if _holds_checkpoint(_files(self._run_dir)):
            return
        try:
            for name in reversed(self._lists()):
                if self._restored(name):
                    return
        except DataError as error:
            hint = "the same command when it can be reached, or cluster.checkpoint_mirror=null, which begins anew"
            raise DataError(error.what, hint=f"{error.hint}; {hint}" if error.hint else hint) from error

    def _restored(self, name: str) -> bool:
        prefix = temporary_prefix(".mirror")
        with tempfile.TemporaryDirectory(prefix=prefix, dir=self._run_dir, ignore_cleanup_errors=True) as folder:
            place = Path(folder)
            try:
                files = self._read(name)
                for path, copied in files.items():
                    self._fetch(copied, place / path)
            except (documents.DamagedError, *DAMAGE) as error:
                self._say(f"WARNING: a copy in {self.shown} is not whole and is skipped: {error}")
                return False
            # The attempts come first: once a checkpoint is here, a later call restores nothing.
            for checkpoint in place.glob("checkpoints/step-*.pt"):
                with suppress(*DAMAGE):  # a script's checkpoint has no such file beside it
                    journal.adopt(self._run_dir, str(read_side(checkpoint)["attempt"]))
            for source in sorted(place.rglob("*")):
                target = self._run_dir / source.relative_to(place)
                target.mkdir(exist_ok=True) if source.is_dir() else source.replace(target)
        step = newest_step(self._run_dir)
        taken = f"that of step {step}" if step else f"{len(files)} files that its script had left"
        self._say(f"the run folder has no checkpoint; took {taken} from {self.shown}")
        return True

    def _fetch(self, copied: MirroredFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.get(f"{self._key}/{_CONTENTS}/{copied.sha256}", target)
        if (seen := sha256_file(target)) != copied.sha256:
            raise ValueError(f"the sha256 of {target.name} is {seen[:12]}, its list says {copied.sha256[:12]}")
        os.utime(target, ns=(copied.mtime_ns, copied.mtime_ns))


def _files(run_dir: Path) -> dict[str, Path]:
    """Return the files of every host's checkpoints by path in the run folder; of a script also its metrics."""
    folders = [run_dir / run_folder.CHECKPOINTS, *run_dir.glob(f"{run_folder.NODES}/*/{run_folder.CHECKPOINTS}")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if not _LEFT_OUT.fullmatch(path.name)]
    if not programs.of_run(run_dir).is_ours:
        paths.append(run_dir / run_folder.METRICS)
    return {path.relative_to(run_dir).as_posix(): path for path in paths if path.is_file()}


def _holds_checkpoint(names: Mapping[str, object]) -> bool:
    return any(name != run_folder.METRICS and not _SIDE.fullmatch(name) for name in names)


def _contents(lists: Iterable[FileList]) -> set[str]:
    return {copied.sha256 for files in lists for copied in files.values()}


def _is_copied(parts: tuple[str, ...]) -> bool:
    """Return True if ``_files`` may return this path; a list that names another one is not trusted."""
    if parts == (run_folder.METRICS,):
        return True
    is_of_node = len(parts) > 3 and parts[0] == run_folder.NODES and parts[1].isdecimal()
    return len(parts) > 1 and parts[2 if is_of_node else 0] == run_folder.CHECKPOINTS and ".." not in parts
