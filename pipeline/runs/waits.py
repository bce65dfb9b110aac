"""Runs of this project whose commands wait until their hosts are free (cluster.when_busy=wait).

Nothing is kept on the hosts during the wait, so only the run's folder records it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.core import documents, locks
from pipeline.core.files import write_json
from pipeline.runs.folder import RunFolder

FILE = "waiting.json"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """``who`` is on ``host``, in words; ``since``: unix time at which the wait began."""

    key: str
    host: str
    who: str
    since: float


class Waiting:
    """The record of one run's wait, for other commands. Without a writable folder nothing is recorded."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._since = run_dir / FILE, time.time()

    def for_host(self, host: str, who: str) -> None:
        with suppress(OSError):
            wait = Wait(key=self._path.parent.name, host=host, who=who, since=self._since)
            write_json(self._path, asdict(wait))

    def is_over(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def under_way(runs_dir: Path) -> list[Wait]:
    """Return the waits whose commands live, the longest first."""
    found = []
    for path in runs_dir.glob(f"*/{FILE}"):
        with suppress(documents.DamagedError, OSError, TypeError):
            if locks.is_held(RunFolder(path.parent).lock):
                found.append(Wait(**documents.read(path)))
    return sorted(found, key=lambda wait: wait.since)
