"""Copies of what a script keeps in its checkpoints, behind an address, for the day on which the run folder is gone.

Nobody knows what its files are called, nor which of them it writes anew. So each content lies there once, under its
sha256, and a sealed list, written last, names the files that belong together, with their times: by these the newest
checkpoint is known.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.core import documents, leftovers
from pipeline.core.files import sha256_file
from pipeline.data.filesystems import ObjectStore
from pipeline.runs.checkpoint_mirror import SETTING
from pipeline.runs.checkpoints import DAMAGE
from trainers.contract import run_folder

_LIST = "script.json"
_CONTENTS = "contents"
_FOLDER, _METRICS = "checkpoints", run_folder.METRICS
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ScriptMirror:
    """That of the run with that key, in a folder of the key's name."""

    taken = "{} files that its script had left"

    def __init__(self, address: str, key: str) -> None:
        """Raises DataError: the address can't be used here."""
        self._store = ObjectStore(address, SETTING)
        self._key = key
        self._pushed: dict[str, tuple[int, int]] = {}

    @property
    def shown(self) -> str:
        """Setting and address, without a login."""
        return self._store.shown

    def is_lost(self, run_dir: Path) -> bool:
        """Whether the run folder has no checkpoint."""
        return not _files(run_dir).keys() - {_METRICS}

    def try_writing(self) -> None:
        """Raises DataError: nothing can be written there."""
        self._store.try_writing(f"{self._key}/.try")

    def push(self, run_dir: Path) -> int:
        """Copy what is new, and the list; how many files it names, 0 where nothing has changed.

        Raises:
            DataError: it can't be written there. FileNotFoundError: a file was removed, or written to, meanwhile.
        """
        stamps = {name: _stamp(path) for name, path in _files(run_dir).items()}
        if self.is_lost(run_dir) or stamps == self._pushed:
            return 0
        there, listed = set(self._store.names(f"{self._key}/{_CONTENTS}")), dict[str, dict[str, Any]]()
        for name, stamp in stamps.items():
            sha256 = sha256_file(run_dir / name)
            if sha256 not in there:
                self._store.put(run_dir / name, f"{self._key}/{_CONTENTS}/{sha256}")
            if _stamp(run_dir / name) != stamp:
                raise FileNotFoundError(f"{name} was written to just now")
            listed[name] = {"sha256": sha256, "mtime_ns": stamp[0]}
        with tempfile.TemporaryDirectory(prefix=leftovers.of_system("mirror")) as folder:
            documents.write_sealed(Path(folder) / _LIST, {"files": listed})
            self._store.put(Path(folder) / _LIST, f"{self._key}/{_LIST}")
        self._pushed = stamps
        for sha256 in there - {about["sha256"] for about in listed.values()}:
            self._store.remove(f"{self._key}/{_CONTENTS}/{sha256}")
        return len(listed)

    def restore(self, run_dir: Path) -> tuple[int, list[str]]:
        """Put all that the list names into the run folder; how many files (0: there is no list), and a warning where
        it isn't whole.

        Raises:
            DataError: a copy can't be read. OSError: the run folder can't be written.
        """
        if _LIST not in self._store.names(self._key):
            return 0, []
        temporary = Path(tempfile.mkdtemp(prefix=leftovers.prefix(".mirror"), dir=run_dir))
        try:
            self._store.get(f"{self._key}/{_LIST}", temporary / _LIST)
            listed: Mapping[str, Any] = documents.read_sealed(temporary / _LIST)["files"]
            for name, about in listed.items():
                self._fetch(name, about, temporary / "files")
            _settle(temporary / "files", run_dir)
            return len(listed), []
        except (documents.DamagedError, *DAMAGE) as error:
            return 0, [f"the copies of {self.shown} are not whole and are left there: {error}"]
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _fetch(self, name: str, about: Mapping[str, Any], folder: Path) -> None:
        """Raises DataError, and what ``DAMAGE`` has."""
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


def _files(run_dir: Path) -> dict[str, Path]:
    """All files of every host's checkpoints, and the metrics until then, by their path in the run folder."""
    folders = [run_dir / _FOLDER, *run_dir.glob(f"{run_folder.NODES}/*/{_FOLDER}")]
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {path.relative_to(run_dir).as_posix(): path for path in [*found, run_dir / _METRICS] if path.is_file()}


def _is_checkpoint(parts: Sequence[str]) -> bool:
    own = len(parts) > 3 and parts[0] == run_folder.NODES and parts[1].isdecimal()
    return parts[2 if own else 0] == _FOLDER


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _settle(source: Path, run_dir: Path) -> None:
    """Move everything. Raises OSError."""
    for path in sorted(source.rglob("*")):
        target = run_dir / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            path.replace(target)
