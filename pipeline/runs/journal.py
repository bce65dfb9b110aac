"""journal.jsonl, the state changes of a run, one JSON object per line; and the ids of the starts of its attempts.

The journal says which attempt began when and how it ended. The ids, in another file, tell the ranks which start is the
newest: ranks of an older one end. An attempt may be started several times, each time under a new id."""

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
    """Return the beginning of the ids of all starts in a run folder, ``KEY-FOLDER-``. It has digits of the folder's
    path, because two clones of a project may train the same key on one host."""
    return f"{run_key}-{sha256_text(str(run_dir))[:6]}-"


def new_attempt_id(run_key: str, run_dir: Path, attempt: int, nonce: str) -> str:
    """Return a new run id, the id of one start; ``nonce`` distinguishes the starts of one attempt."""
    return f"{attempt_prefix(run_key, run_dir)}{attempt}-{nonce}"


def prefix_of_attempt(run_id: str) -> str:
    """Return the ``attempt_prefix`` of a run id."""
    return run_id.rsplit("-", 2)[0] + "-"


def attempt_number(run_id: str) -> int:
    """Return the attempt number in a run id."""
    return int(run_id.rsplit("-", 2)[1])


def known_attempts(run_dir: Path) -> list[str]:
    """Return the run ids of all starts so far, newest last; none if the file is missing or damaged."""
    value = documents.read_or_empty(run_dir / run_folder.ATTEMPT_IDS).get("attempts")
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def register_attempt(run_dir: Path, run_id: str) -> None:
    """Make ``run_id`` the newest start; ranks of older starts end when they read it. Raises OSError."""
    write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [*known_attempts(run_dir), run_id]})


def adopt(run_dir: Path, run_id: str) -> None:
    """Add the id of a start in a run folder that was lost, so that ranks trust its checkpoint here. Raises OSError."""
    if run_id not in known_attempts(run_dir):
        write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [run_id, *known_attempts(run_dir)]})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A state change. ``time`` is unix seconds; ``detail`` is text for users."""

    state: State
    attempt: int
    time: float
    detail: str = ""

    @property
    def first_line(self) -> str:
        """The first line of the detail."""
        return self.detail.strip().partition("\n")[0]


def append(path: Path, entry: Entry) -> None:
    """Append one state change and flush it to disk. Raises OSError."""
    append_lines(path, [{"state": entry.state, "attempt": entry.attempt, "time": entry.time, "detail": entry.detail}])


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON objects, one per line, by a single write (atomic under O_APPEND), then fsync. Raises OSError."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        # a writer may have died within its line: appended to that half line, the new one would be unreadable too
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + text.encode()
        if os.write(descriptor, data) != len(data):  # a full disk takes only a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Entry]:
    """Return all valid lines in order; a torn or altered line is left out."""
    return [entry for line in lines(path) if (entry := _parsed(line)) is not None]


def unreadable_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that ``read`` leaves out, as (number from 1, text)."""
    return [(number, line) for number, line in enumerate(lines(path), start=1) if line and _parsed(line) is None]


def lines(path: Path) -> list[str]:
    """Return the lines; none for a missing file or a directory in its place. Raises OSError."""
    try:
        return documents.content(path).decode(errors="replace").splitlines()
    except (FileNotFoundError, documents.DamagedError):
        return []


def _parsed(line: str) -> Entry | None:
    try:
        raw = json.loads(line)
        seconds, attempt = float(raw["time"]), raw["attempt"]
        time.gmtime(seconds)  # raises OverflowError or OSError for a time that no calendar has
        if type(attempt) is int and 0 <= attempt < 1 << 31:
            return Entry(state=State(raw["state"]), attempt=attempt, time=seconds, detail=str(raw.get("detail", "")))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RecursionError):
        pass
    return None


def attempts(path: Path) -> int:
    """Return the number of attempts started so far."""
    return max((entry.attempt for entry in read(path)), default=0)
