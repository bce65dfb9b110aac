"""Files of checkpoints on the disk: names, verification, and removal of old or damaged ones."""

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
    """Return a checkpoint's .json content with ``digest``, the sha256 of the canonical JSON of all other fields."""
    return {**side, "digest": _digest(side)}


def read_verified(path: Path) -> dict[str, Any]:
    """Read a checkpoint's .json and verify its digest and the sha256 of each file that it names.

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
    """Return shards-00000123 for step-00000123.pt."""
    return path.with_name(path.stem.replace("step-", "shards-"))


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint and all its files to ``*.bad``, so that it is no longer used."""
    for part in (path, path.with_suffix(".json"), shards_of(path)):
        with contextlib.suppress(OSError):  # missing, or the folder is read-only, which the next write reports
            part.replace(part.with_name(part.name + _BAD))


def prune(newest: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``newest``, which is known to be complete.

    Raises:
        OSError: the folder can't be written.
    """
    folder = newest.parent
    for old in [path for path in step_files(folder) if path <= newest][:-keep]:
        old.unlink()
        shutil.rmtree(shards_of(old), ignore_errors=True)
    # remove each .json last: a .pt without its .json would be taken for a damaged checkpoint
    for path in folder.glob("step-*.json"):
        if not path.with_suffix(".pt").exists():
            path.unlink()


def remove_set_aside(folder: Path) -> None:
    """Delete the files that ``set_aside`` renamed. Raises OSError."""
    for path in folder.glob(f"*{_BAD}"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def remove_stray_shards(folder: Path) -> None:
    """Delete shards without a checkpoint: their writer was killed before it wrote the step-*.pt."""
    known = {shards_of(path) for path in step_files(folder)}
    for path in folder.glob("shards-*"):
        if path not in known and path.suffix != _BAD:
            shutil.rmtree(path, ignore_errors=True)


def step_files(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def _digest(side: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in side.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
