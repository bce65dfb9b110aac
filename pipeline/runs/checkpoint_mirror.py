"""Copies of a run's newest checkpoints at an address, in case the run folder is lost: ``cluster.checkpoint_mirror``.

A copy is complete if its ``step-….json``, which is written last, is there and all digests in it match. So an
incomplete copy is never restored.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core import documents
from pipeline.core.errors import DataError
from pipeline.core.files import Stamp, sha256_file, stamp, system_temporary_prefix, temporary_prefix
from pipeline.data.sources.filesystems import ObjectStore
from pipeline.runs import journal
from pipeline.runs.checkpoints import DAMAGE, newest_step, read_side, read_verified, step_of
from trainers.contract import run_folder

SETTING = "cluster.checkpoint_mirror"
_KEPT = 2  # the newest, and one more
_STEP = re.compile(r"step-(\d+)\.json")
_PART = re.compile(r"(?:step|shards)-(\d{8,})(?:\.json|\.pt)?")
_OF_SHARDS = re.compile(r"shards-\d+/[\w.-]+")
_LIST = "script.json"
_CONTENTS = "contents"
_FOLDER, _METRICS = "checkpoints", run_folder.METRICS
_SHA256 = re.compile(r"[0-9a-f]{64}")


@contextmanager
def _temporary(run_dir: Path) -> Iterator[Path]:
    """Make a folder on the run folder's disk for the block."""
    prefix = temporary_prefix(".mirror")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=run_dir, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Mirror:
    """The copies of one run, in a folder named by its key."""

    def __init__(self, address: str, key: str) -> None:
        """Raises DataError: the address can't be used here."""
        self._store = ObjectStore(address, SETTING)
        self._key = key

    @property
    def shown(self) -> str:
        """The setting and the address, without a login."""
        return self._store.named

    def try_writing(self) -> None:
        """Write and remove a test file. Raises DataError: nothing can be written there."""
        self._store.try_writing(f"{self._key}/.try")


class CheckpointMirror(_Mirror):
    """Copies of the built-in trainer's checkpoints, whose file names are known; the newest ones are kept."""

    taken = "that of step {}"

    def __init__(self, address: str, key: str) -> None:
        """Raises DataError: the address can't be used here."""
        super().__init__(address, key)
        self._pushed = 0

    def is_lost(self, run_dir: Path) -> bool:
        """Whether the run folder has no checkpoint."""
        return not newest_step(run_dir)

    def push(self, run_dir: Path) -> int:
        """Copy the newest checkpoint of the run folder unless it was copied before.

        Return its step; 0 if nothing was copied.

        Raises:
            DataError: it can't be written there.
            FileNotFoundError: it was removed in the meantime, for a newer one.
        """
        folder = run_dir / run_folder.CHECKPOINTS
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            step = step_of(path)
            if step <= self._pushed:
                return 0
            try:
                side = read_side(path)
            except DAMAGE:  # it is just being written, or is damaged
                continue
            best = [name for name in ("best.pt", "best.json") if (folder / name).exists()]
            try:
                for name in (*best, *_files(path, side), f"{path.stem}.json"):
                    self._store.put(folder / name, f"{self._key}/{name}")
            except DataError:
                self._forget_torn(step)
                raise
            self._pushed = step
            self._forget_old(step)
            return step
        return 0

    def _forget_old(self, newest: int) -> None:
        """Remove old copies, and incomplete ones that a killed command left.

        Copies of steps above ``newest`` stay until the run has passed them: the run took the newest complete checkpoint
        and began below them, so they may be damaged.
        """
        names = self._store.names(self._key)
        whole = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
        kept = [step for step in whole if step <= newest][-_KEPT:]
        parts = {int(match[1]) for name in names if (match := _PART.fullmatch(name))}
        for step in sorted(step for step in parts if step <= newest and step not in kept):
            self._forget(step, names)

    def _forget_torn(self, step: int) -> None:
        """Remove what a failed copy left, because it takes the next one's room on a full disk."""
        with suppress(DataError):
            names = self._store.names(self._key)
            if f"step-{step:08d}.json" not in names:  # else a store that writes whole files has it from before
                self._forget(step, names)

    def _forget(self, step: int, names: list[str]) -> None:
        """Remove a copy, first the file that makes it complete."""
        for name in (f"step-{step:08d}.json", f"step-{step:08d}.pt", f"shards-{step:08d}"):
            if name in names:
                self._store.remove(f"{self._key}/{name}")

    def restore(self, run_dir: Path) -> tuple[int, list[str]]:
        """Put the newest complete checkpoint into the run folder.

        Return its step (0: there is none), and warnings about incomplete ones.

        Raises:
            DataError: one can't be read, so its completeness is unknown.
            OSError: the run folder can't be written.
        """
        steps = [name for name in self._store.names(self._key) if _STEP.fullmatch(name)]
        warnings: list[str] = []
        for name in sorted(steps, key=lambda name: step_of(Path(name)), reverse=True):
            with _temporary(run_dir) as temporary:
                try:
                    written_by = self._fetch(name, temporary)
                except DAMAGE as error:
                    warnings.append(f"{name.removesuffix('.json')} of {self.shown} is skipped: {error}")
                    continue
                journal.adopt(run_dir, written_by)  # first: once a checkpoint is here, none is looked for
                _settle(temporary, run_dir / run_folder.CHECKPOINTS, name)
                return step_of(Path(name)), warnings
        return 0, warnings

    def _fetch(self, name: str, folder: Path) -> str:
        """Fetch a checkpoint, and the best weights if they are complete. Return the id of the attempt that wrote it.

        Raises DataError, and what ``read_verified`` raises.
        """
        checkpoint = folder / name.replace(".json", ".pt")
        self._store.get(f"{self._key}/{name}", folder / name)
        for file in _files(checkpoint, read_side(checkpoint)):
            (folder / file).parent.mkdir(exist_ok=True)
            self._store.get(f"{self._key}/{file}", folder / file)
        written_by = str(read_verified(checkpoint)["attempt"])
        try:
            for file in ("best.json", "best.pt"):
                self._store.get(f"{self._key}/{file}", folder / file)
            read_verified(folder / "best.pt")
        except DAMAGE:  # of a run that keeps none, or overtaken by a newer one
            for file in ("best.json", "best.pt"):
                (folder / file).unlink(missing_ok=True)
        return written_by


def _files(path: Path, side: dict[str, Any]) -> list[str]:
    """Return a checkpoint's files besides its .json. Raises ValueError: a name that leads elsewhere."""
    shards = list(side.get("shards", {}))
    for name in shards:
        if not _OF_SHARDS.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return [path.name, *shards]


def _settle(source: Path, target: Path, last: str) -> None:
    """Move all files into place, ``last`` at the end. Raises OSError."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        if path.is_dir():
            shutil.rmtree(target / path.name, ignore_errors=True)
        path.replace(target / path.name)


class ScriptMirror(_Mirror):
    """Copies of a script's checkpoints.

    The names of its files, and which of them change, are unknown. So each content is stored once, under its sha256. A
    sealed list, written last, names the files that belong together, with their times, which decide the newest
    checkpoint.
    """

    taken = "{} files that its script had left"

    def __init__(self, address: str, key: str) -> None:
        """Raises DataError: the address can't be used here."""
        super().__init__(address, key)
        self._pushed: dict[str, Stamp] = {}

    def is_lost(self, run_dir: Path) -> bool:
        """Whether the run folder has no checkpoint."""
        return not _script_files(run_dir).keys() - {_METRICS}

    def push(self, run_dir: Path) -> int:
        """Copy new files and the list. Return the number of files in the list; 0 if nothing has changed.

        Raises:
            DataError: it can't be written there.
            FileNotFoundError: a file was removed or changed in the meantime.
        """
        stamps = {name: stamp(path) for name, path in _script_files(run_dir).items()}
        if self.is_lost(run_dir) or stamps == self._pushed:
            return 0
        there, listed = set(self._store.names(f"{self._key}/{_CONTENTS}")), dict[str, dict[str, Any]]()
        for name, seen in stamps.items():
            sha256 = sha256_file(run_dir / name)
            if sha256 not in there:
                self._store.put(run_dir / name, f"{self._key}/{_CONTENTS}/{sha256}")
            if stamp(run_dir / name) != seen:
                raise FileNotFoundError(f"{name} was written to just now")
            listed[name] = {"sha256": sha256, "mtime_ns": seen.mtime_ns}
        with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("mirror")) as folder:
            documents.write_sealed(Path(folder) / _LIST, {"files": listed})
            self._store.put(Path(folder) / _LIST, f"{self._key}/{_LIST}")
        self._pushed = stamps
        for sha256 in there - {about["sha256"] for about in listed.values()}:
            self._store.remove(f"{self._key}/{_CONTENTS}/{sha256}")
        return len(listed)

    def restore(self, run_dir: Path) -> tuple[int, list[str]]:
        """Put all files of the list into the run folder.

        Return their number (0: there is no list), and a warning if it is incomplete.

        Raises:
            DataError: a copy can't be read.
            OSError: the run folder can't be written.
        """
        if _LIST not in self._store.names(self._key):
            return 0, []
        with _temporary(run_dir) as temporary:
            try:
                self._store.get(f"{self._key}/{_LIST}", temporary / _LIST)
                listed: Mapping[str, Any] = documents.read_sealed(temporary / _LIST)["files"]
                for name, about in listed.items():
                    self._fetch(name, about, temporary / "files")
            except (documents.DamagedError, *DAMAGE) as error:
                return 0, [f"the copies of {self.shown} are not whole and are left there: {error}"]
            for path in sorted((temporary / "files").rglob("*")):
                target = run_dir / path.relative_to(temporary / "files")
                target.mkdir(parents=True, exist_ok=True) if path.is_dir() else path.replace(target)
            return len(listed), []

    def _fetch(self, name: str, about: Mapping[str, Any], folder: Path) -> None:
        """Fetch one file. Raises DataError, and the errors in ``DAMAGE``."""
        sha256, parts = str(about["sha256"]), PurePosixPath(name).parts
        if name != _METRICS and (not _is_checkpoint(parts) or ".." in parts):
            raise ValueError(f"{name!r} is no file of a checkpoint")
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"{name!r} has no sha256")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.get(f"{self._key}/{_CONTENTS}/{sha256}", target)
        if (seen := sha256_file(target)) != sha256:
            raise ValueError(f"the sha256 of {name} is {seen[:12]}, the list says {sha256[:12]}")
        os.utime(target, ns=(int(about["mtime_ns"]), int(about["mtime_ns"])))


def _script_files(run_dir: Path) -> dict[str, Path]:
    """Return all files of every host's checkpoints, and the metrics so far, by their path in the run folder."""
    folders = [run_dir / _FOLDER, *run_dir.glob(f"{run_folder.NODES}/*/{_FOLDER}")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {path.relative_to(run_dir).as_posix(): path for path in [*paths, run_dir / _METRICS] if path.is_file()}


def _is_checkpoint(parts: Sequence[str]) -> bool:
    own = len(parts) > 3 and parts[0] == run_folder.NODES and parts[1].isdecimal()
    return parts[2 if own else 0] == _FOLDER


class Mirroring:
    """Copies the checkpoints of one run to its mirror, and reports failures through ``say``."""

    def __init__(self, mirror: CheckpointMirror | ScriptMirror, run_dir: Path, say: Callable[[str], None]) -> None:
        self._mirror, self._run_dir, self._say = mirror, run_dir, say
        self._failed = False

    @property
    def shown(self) -> str:
        """The setting and the address, without a login."""
        return self._mirror.shown

    def try_writing(self) -> None:
        """Test at the start whether the mirror can be written; report a failure as ``push`` does."""
        try:
            self._mirror.try_writing()
        except DataError as error:
            self._warn(error)

    def push(self) -> None:
        """Copy the newest checkpoint. A failure doesn't end the training; a row of failures is reported once."""
        try:
            self._mirror.push(self._run_dir)
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

    def restore(self) -> None:
        """Restore a checkpoint if the run folder has none. Raises DataError: the mirror can't be read."""
        if not self._mirror.is_lost(self._run_dir):
            return
        try:
            restored, warnings = self._mirror.restore(self._run_dir)
        except DataError as error:
            hint = "the same command when it can be reached, or cluster.checkpoint_mirror=null, which begins anew"
            raise DataError(error.what, hint=f"{error.hint}; {hint}" if error.hint else hint) from error
        for warning in warnings:
            self._say(f"WARNING: {warning}")
        if restored:
            taken = self._mirror.taken.format(restored)
            self._say(f"the run folder has no checkpoint; took {taken} from {self._mirror.shown}")
