"""Copies of a run's checkpoints at an address, in case the run folder is lost: ``cluster.checkpoint_mirror``.

Each content is stored once, under its sha256. A list names all files of one moment; it is sealed, and written after the
contents. The newest two lists are kept. The newest list whose contents all match is restored.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipeline.core import documents
from pipeline.core import program as programs
from pipeline.core.errors import DataError
from pipeline.core.files import Stamp, sha256_file, stamp, system_temporary_prefix, temporary_prefix
from pipeline.data.sources.source import ObjectStore
from pipeline.runs import journal
from pipeline.runs.checkpoints import DAMAGE, newest_step, read_side
from trainers.contract import run_folder

SETTING = "cluster.checkpoint_mirror"
_KEPT = 2  # lists
_LIST = re.compile(r"files-(\d{8,})\.json")
_CONTENTS = "contents"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIDE = re.compile(r"checkpoints/step-\d+\.json")  # it lies beside a checkpoint, and is none by itself
_LEFT_OUT = re.compile(r"\..*\.tmp|.*\.bad")  # files that are being written, and damaged ones


class Copied(NamedTuple):
    """A file as a list names it. Its times decide which one of a script's checkpoints is the newest."""

    sha256: str
    mtime_ns: int


Files = Mapping[str, Copied]
"""Path in the run folder → its copy."""


class CheckpointMirror:
    """The copies of one run, in a folder named by its key. ``say`` gets warnings, and a line about a restored copy."""

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
        """Copy new contents, then a new list, and remove what only older lists name.

        Raises DataError, OSError; FileNotFoundError: a file was removed or changed meanwhile.
        """
        stamps = {name: stamp(path) for name, path in _files(self._run_dir).items()}
        if not _holds_checkpoint(stamps) or stamps == {name: seen for name, (seen, _) in self._pushed.items()}:
            return
        names = self._lists()
        lists: dict[str, Files] = {}
        for name in names:
            with suppress(documents.DamagedError, *DAMAGE):
                lists[name] = self._read(name)
        pushed = self._copy_contents(stamps, _contents(lists.values()))
        files = {name: Copied(sha256, seen.mtime_ns) for name, (seen, sha256) in pushed.items()}
        number = 1 + max((int(name[6:-5]) for name in names), default=0)
        newest = f"files-{number:08d}.json"
        with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("mirror")) as folder:
            listed = {name: copied._asdict() for name, copied in files.items()}
            documents.write_sealed(Path(folder) / newest, {"files": listed})
            self._put(Path(folder) / newest, newest)
        self._pushed = pushed
        kept = {name: lists[name] for name in sorted(lists)[1 - _KEPT :]} | {newest: files}
        for name in {*names} - {*kept}:
            self._store.remove(f"{self._key}/{name}")
        for sha256 in {*self._store.names(f"{self._key}/{_CONTENTS}")} - _contents(kept.values()):
            self._store.remove(f"{self._key}/{_CONTENTS}/{sha256}")

    def _copy_contents(self, names: Iterable[str], stored: Container[str]) -> dict[str, tuple[Stamp, str]]:
        """Copy the files whose sha256 isn't ``stored``; return the stamp and sha256 of each file."""
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
        return sorted(name for name in self._store.names(self._key) if _LIST.fullmatch(name))

    def _read(self, name: str) -> Files:
        """Read a list. Raises DataError, DamagedError, and the errors in ``DAMAGE``."""
        with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("mirror")) as folder:
            self._store.get(f"{self._key}/{name}", Path(folder) / name)
            listed = documents.read_sealed(Path(folder) / name)["files"]
        files = {path: Copied(str(raw["sha256"]), int(raw["mtime_ns"])) for path, raw in listed.items()}
        for path, copied in files.items():
            if not _is_copied(PurePosixPath(path).parts):
                raise ValueError(f"{path!r} is no file of a checkpoint")
            if not _SHA256.fullmatch(copied.sha256):
                raise ValueError(f"{path!r} has no sha256")
        return files

    def restore(self) -> None:
        """Restore the newest whole copy if the run folder has no checkpoint.

        Raises:
            DataError: the mirror can't be read, so it is unknown where the run goes on.
            OSError: the run folder can't be written.
        """
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
        """Put the files of a list into the run folder; False if a content is missing or doesn't match."""
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

    def _fetch(self, copied: Copied, target: Path) -> None:
        """Fetch one file. Raises DataError, and the errors in ``DAMAGE``."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.get(f"{self._key}/{_CONTENTS}/{copied.sha256}", target)
        if (seen := sha256_file(target)) != copied.sha256:
            raise ValueError(f"the sha256 of {target.name} is {seen[:12]}, its list says {copied.sha256[:12]}")
        os.utime(target, ns=(copied.mtime_ns, copied.mtime_ns))


def _files(run_dir: Path) -> dict[str, Path]:
    """Return all files of every host's checkpoints by their path in the run folder; of a script also its metrics.

    A checkpoint of the trainer holds the metrics up to it.
    """
    folders = [run_dir / run_folder.CHECKPOINTS, *run_dir.glob(f"{run_folder.NODES}/*/{run_folder.CHECKPOINTS}")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if not _LEFT_OUT.fullmatch(path.name)]
    if not programs.of_run(run_dir).is_ours:
        paths.append(run_dir / run_folder.METRICS)
    return {path.relative_to(run_dir).as_posix(): path for path in paths if path.is_file()}


def _holds_checkpoint(names: Mapping[str, object]) -> bool:
    return any(name != run_folder.METRICS and not _SIDE.fullmatch(name) for name in names)


def _contents(lists: Iterable[Files]) -> set[str]:
    return {copied.sha256 for files in lists for copied in files.values()}


def _is_copied(parts: tuple[str, ...]) -> bool:
    """Return True if ``_files`` may return this path; a list that names another one is not trusted."""
    if parts == (run_folder.METRICS,):
        return True
    is_of_node = len(parts) > 3 and parts[0] == run_folder.NODES and parts[1].isdecimal()
    return len(parts) > 1 and parts[2 if is_of_node else 0] == run_folder.CHECKPOINTS and ".." not in parts
