"""The state changes of a run, one JSON object a line, appended and flushed to disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.types import State


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``time`` is unix seconds; ``detail`` is one line for people."""

    state: State
    attempt: int
    time: float
    detail: str = ""


def append(path: Path, entry: Entry) -> None:
    """One write of one line (atomic under O_APPEND), then fsync. Raises OSError."""
    append_lines(path, [{"state": entry.state, "attempt": entry.attempt, "time": entry.time, "detail": entry.detail}])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """The same of JSON objects, a line each. Raises OSError."""
    line = "".join(json.dumps(value) + "\n" for value in values)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # or this line would be lost with that one
        data = (b"\n" if torn else b"") + line.encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Entry]:
    """All whole lines; a torn last line (a crash while writing) is left out."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            raw = json.loads(line)
            entries.append(
                Entry(
                    state=State(raw["state"]),
                    attempt=raw["attempt"],
                    time=raw["time"],
                    detail=raw.get("detail", ""),
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return entries


def attempts(path: Path) -> int:
    """How many attempts have been started so far."""
    return max((entry.attempt for entry in read(path)), default=0)
