"""The files of checkpoints on the disk: their names, and whether they are what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.core.files import sha256_file

_BAD = ".bad"


def sealed(side: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside a checkpoint, with ``digest``: the sha256 of the canonical JSON of all its other fields."""
    return {**side, "digest": _digest(side)}


def read_verified(path: Path) -> dict[str, Any]:
    """What stands beside a checkpoint, whose files have the sha256 that it names.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: the checkpoint is torn, altered or unreadable.
    """
    side = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if not isinstance(side, dict) or side["digest"] != _digest(side):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    for name, sha256 in {path.name: side["sha256"], **side.get("shards", {})}.items():
        seen = sha256_file(path.parent / name)
        if seen != sha256:
            raise ValueError(f"the sha256 of {name} is {seen[:12]}, {path.stem}.json says {sha256[:12]}")
    return side


def shards_of(path: Path) -> Path:
    """step-00000123.pt → shards-00000123."""
    return path.with_name(path.stem.replace("step-", "shards-"))


def set_aside(path: Path) -> None:
    """Rename a checkpoint that isn't what was written, and all that belongs to it, to ``*.bad``: it counts no more."""
    for part in (path, path.with_suffix(".json"), shards_of(path)):
        with contextlib.suppress(OSError):  # it isn't there; or the folder can't be written, which is said soon
            part.replace(part.with_name(part.name + _BAD))


def prune(newest: Path, keep: int) -> None:
    """Remove all but ``keep`` checkpoints up to ``newest``, which is known to be whole.

    A .json goes last: without its own a checkpoint would be taken for a damaged one.

    Raises:
        OSError: the folder can't be written.
    """
    folder = newest.parent
    for old in [path for path in step_files(folder) if path <= newest][:-keep]:
        old.unlink()
        shutil.rmtree(shards_of(old), ignore_errors=True)
    for path in folder.glob("step-*.json"):
        if not path.with_suffix(".pt").exists():
            path.unlink()


def remove_set_aside(folder: Path) -> None:
    """What ``set_aside`` has left. Raises OSError."""
    for path in folder.glob(f"*{_BAD}"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def remove_stray_shards(folder: Path) -> None:
    """Those of steps without a checkpoint: their writer died."""
    known = {shards_of(path) for path in step_files(folder)}
    for path in folder.glob("shards-*"):
        if path not in known and path.suffix != _BAD:
            shutil.rmtree(path, ignore_errors=True)


def step_files(folder: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def _digest(side: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in side.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
