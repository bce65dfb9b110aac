"""The files of checkpoints on the disk: their names, and whether they are what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
        seen = _sha256(path.parent / name)
        if seen != sha256:
            raise ValueError(f"the sha256 of {name} is {seen[:12]}, {path.stem}.json says {sha256[:12]}")
    return side


def shards_of(path: Path) -> Path:
    """step-00000123.pt → shards-00000123."""
    return path.with_name(path.stem.replace("step-", "shards-"))


def _digest(side: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in side.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
