"""The state changes of a run, one JSON object a line, appended and flushed to disk."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.files import sha256_text, write_json
from pipeline.core.specs import State
from trainers.contract import run_folder


def attempt_prefix(run_key: str, run_dir: Path) -> str:
    """How the ids of all attempts of one run folder begin, whatever folder stood at its path before.

    Two clones may train the same key on the same hosts: what is ended for one of them is not the other's.
    """
    return f"{run_key}-{sha256_text(str(run_dir))[:6]}-"


def new_attempt_id(run_key: str, run_dir: Path, attempt: int, nonce: str) -> str:
    """A run id that no other start has; ``nonce`` sets the starts of one attempt apart."""
    return f"{attempt_prefix(run_key, run_dir)}{attempt}-{nonce}"


def prefix_of_attempt(run_id: str) -> str:
    """The ``prefix`` that a run id was made with."""
    return run_id.rsplit("-", 2)[0] + "-"


def attempt_number(run_id: str) -> int:
    """Which attempt a run id is of."""
    return int(run_id.rsplit("-", 2)[1])


def known_attempts(run_dir: Path) -> list[str]:
    """The run ids of all starts so far, the newest last; none where the file is missing or damaged."""
    try:
        value = json.loads((run_dir / run_folder.ATTEMPT_IDS).read_text(encoding="utf-8"))["attempts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def register_attempt(run_dir: Path, run_id: str) -> None:
    """Make ``run_id`` the newest attempt: ranks of another one end when they see it. Raises OSError."""
    write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [*known_attempts(run_dir), run_id]})


def adopt(run_dir: Path, run_id: str) -> None:
    """Count what ``run_id`` has written as this folder's own: an attempt of the run in a folder that was lost. Raises
    OSError."""
    if run_id not in known_attempts(run_dir):
        write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [run_id, *known_attempts(run_dir)]})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``time`` is unix seconds; ``detail`` is one line for people."""

    state: State
    attempt: int
    time: float
    detail: str = ""

    @property
    def first_line(self) -> str:
        """That of the detail."""
        return self.detail.strip().partition("\n")[0]


def append(path: Path, entry: Entry) -> None:
    """One write of one line (atomic under O_APPEND), then fsync. Raises OSError."""
    append_lines(path, [{"state": entry.state, "attempt": entry.attempt, "time": entry.time, "detail": entry.detail}])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """The same of JSON objects, a line each. Raises OSError."""
    line = "".join(json.dumps(value) + "\n" for value in values)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
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
    """All lines that make sense, in their order; one that was torn or altered is left out and costs no other."""
    return [entry for line in lines(path) if (entry := _parsed(line)) is not None]


def torn(path: Path) -> list[tuple[int, str]]:
    """The lines that ``read`` leaves out: their numbers (from 1) and what they say."""
    return [(number, line) for number, line in enumerate(lines(path), start=1) if line and _parsed(line) is None]


def lines(path: Path) -> list[str]:
    """Its text; none of a missing file, nor of a directory in its place. Raises OSError."""
    try:
        return documents.content(path).decode(errors="replace").splitlines()
    except (FileNotFoundError, documents.DamagedError):
        return []


def _parsed(line: str) -> Entry | None:
    try:
        raw = json.loads(line)
        return Entry(
            state=State(raw["state"]),
            attempt=_whole(raw["attempt"]),
            time=_time(raw["time"]),
            detail=str(raw.get("detail", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise TypeError(f"{value!r} counts nothing")
    return value


def _time(value: Any) -> float:
    seconds = float(value)
    time.gmtime(seconds)  # raises where it is no time of this world
    return seconds


def attempts(path: Path) -> int:
    """How many attempts have been started so far."""
    return max((entry.attempt for entry in read(path)), default=0)
