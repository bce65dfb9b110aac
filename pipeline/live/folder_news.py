"""What a run's folder tells of it, look by look: new lines of metrics.jsonl, new checkpoints. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.live.run_state import Saved
from pipeline.runs import checkpoints, metrics_file
from pipeline.runs.metrics_file import MetricsRow
from trainers.contract import run_folder


class FolderNews:
    """``look`` yields what came since the last one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / run_folder.METRICS
        self._at = 0
        self._saved = 0

    def look(self) -> Iterator[MetricsRow | Saved]:
        """A folder that can't be read right now has no news."""
        with suppress(OSError):
            yield from self._rows()
        with suppress(OSError):
            newest = checkpoints.newest_step(self._run_dir)
            if newest != self._saved:
                self._saved = newest
                yield Saved(step=newest)

    def _rows(self) -> Iterator[MetricsRow]:
        """Whole lines alone; a file that was cut back to a checkpoint is read again from there."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            self._at = min(self._at, size)
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for text in whole.splitlines():
            if (row := metrics_file.parse(text)) is not None:
                yield row
