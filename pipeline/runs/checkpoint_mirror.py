"""Copies of a run's newest checkpoints behind an address, for the day on which the run folder is gone.

A checkpoint there counts when its ``step-….json``, which is written last, is there and everything has the digests that
it names: half of one is never taken for a whole one.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.core import leftovers
from pipeline.core.errors import DataError
from pipeline.data.filesystems import ObjectStore
from pipeline.runs import attempts
from pipeline.runs.checkpoints import DAMAGE, newest_step, read_side, read_verified
from trainers.contract import run_folder

SETTING = "cluster.checkpoint_mirror"
_KEPT = 2  # the newest, and one more
_STEP = re.compile(r"step-(\d+)\.json")
_PART = re.compile(r"(?:step|shards)-(\d{8,})(?:\.json|\.pt)?")
_OF_SHARDS = re.compile(r"shards-\d+/[\w.-]+")


class CheckpointMirror:
    """Those of the run with that key, in a folder of the key's name."""

    taken = "that of step {}"

    def __init__(self, address: str, key: str) -> None:
        """Raises DataError: the address can't be used here."""
        self._store = ObjectStore(address, SETTING)
        self._key = key
        self._pushed = 0

    @property
    def shown(self) -> str:
        """Setting and address, without a login."""
        return self._store.shown

    def is_lost(self, run_dir: Path) -> bool:
        """Whether the run folder has no checkpoint."""
        return not newest_step(run_dir)

    def try_writing(self) -> None:
        """Raises DataError: nothing can be written there."""
        self._store.try_writing(f"{self._key}/.try")

    def push(self, run_dir: Path) -> int:
        """Copy the newest checkpoint of the run folder unless that was done; its step, 0 where nothing was copied.

        Raises:
            DataError: it can't be written there. FileNotFoundError: it was removed meanwhile, for a newer one.
        """
        folder = run_dir / run_folder.CHECKPOINTS
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            step = int(path.stem.removeprefix("step-"))
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
        """Also what has no file by which it counts: a command was killed while it copied.

        Those of higher steps than ``newest`` are no reason to let it go: the run, which takes the newest that is whole,
        has begun below them, so they may be damaged. They go once it has passed them.
        """
        names = self._store.names(self._key)
        whole = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
        kept = [step for step in whole if step <= newest][-_KEPT:]
        parts = {int(match[1]) for name in names if (match := _PART.fullmatch(name))}
        for step in sorted(step for step in parts if step <= newest and step not in kept):
            self._forget(step, names)

    def _forget_torn(self, step: int) -> None:
        """What a copy that failed has left: it would take the room of the next one on a disk that is full."""
        with suppress(DataError):
            names = self._store.names(self._key)
            if f"step-{step:08d}.json" not in names:  # else a store that writes whole files has it from before
                self._forget(step, names)

    def _forget(self, step: int, names: list[str]) -> None:
        """First the file by which a checkpoint counts."""
        for name in (f"step-{step:08d}.json", f"step-{step:08d}.pt", f"shards-{step:08d}"):
            if name in names:
                self._store.remove(f"{self._key}/{name}")

    def restore(self, run_dir: Path) -> tuple[int, list[str]]:
        """Put the newest checkpoint that is whole there into the run folder; its step (0: there is none), and warnings
        about those that aren't.

        Raises:
            DataError: one can't be read, so nobody knows whether it is whole. OSError: the run folder can't be written.
        """
        steps = [name for name in self._store.names(self._key) if _STEP.fullmatch(name)]
        warnings: list[str] = []
        for name in sorted(steps, key=_number, reverse=True):
            temporary = Path(tempfile.mkdtemp(prefix=leftovers.prefix(".mirror"), dir=run_dir))
            try:
                written_by = self._fetch(name, temporary)
            except DAMAGE as error:
                warnings.append(f"{name.removesuffix('.json')} of {self.shown} is skipped: {error}")
            else:
                attempts.adopt(run_dir, written_by)  # first: once a checkpoint is here, none is looked for
                _settle(temporary, run_dir / run_folder.CHECKPOINTS, name)
                return _number(name), warnings
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return 0, warnings

    def _fetch(self, name: str, folder: Path) -> str:
        """A checkpoint, and the best weights where they are whole there; the id of the attempt that wrote it.

        Raises DataError, and as ``read_verified``.
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
    """What a checkpoint is beside its .json. Raises ValueError: a name that leads elsewhere."""
    shards = list(side.get("shards", {}))
    for name in shards:
        if not _OF_SHARDS.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return [path.name, *shards]


def _settle(source: Path, target: Path, last: str) -> None:
    """Move everything, ``last`` at the end. Raises OSError."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        if path.is_dir():
            shutil.rmtree(target / path.name, ignore_errors=True)
        path.replace(target / path.name)


def _number(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(".json"))
