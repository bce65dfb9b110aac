"""Rows in a script's own files that its attempt did not record, as what starts the script was killed before it looked.

Standard library only: the controller does the same with what hosts sent it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.contract import run_folder
from trainers.script.files import write_json, write_text
from trainers.script.metrics_file import Row
from trainers.script.sources import CsvTables, EventFiles, FilesBelow, JsonLines

_Value = tuple[int, int | None, str, float]
"""Step, epoch, metric, number. Of a metric's name its last part: which file's name stands before it depends on which
file came first."""


def files_of(run_dir: Path, earlier: Mapping[Path, int] | None = None) -> FilesBelow:
    """Where the script on node 0 may write metrics; ``earlier`` as FilesBelow has it."""
    work = _folder(run_dir) / run_folder.CODE
    return FilesBelow(run_dir / run_folder.OUTPUTS, run_dir / run_folder.CHECKPOINTS, work, earlier=earlier)


def note_begin(run_dir: Path, files: FilesBelow) -> None:
    """Note what lies there before the script of an attempt begins. Raises OSError."""
    sizes = {path.relative_to(run_dir).as_posix(): size for path, size in files.earlier.items()}
    write_json(_folder(run_dir) / run_folder.EARLIER, sizes)


def keep(run_dir: Path) -> None:
    """Append what the last attempt did not record to what it logged by ``paceline.log``, which the next one records.

    Call it before the files are moved. Half a line is left out: nobody writes its end. Raises OSError.
    """
    note, logged = _folder(run_dir) / run_folder.EARLIER, _folder(run_dir) / run_folder.LOGGED
    try:
        value = json.loads(note.read_text(encoding="utf-8"))
        earlier = {run_dir / name: int(size) for name, size in value.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return
    files, known = files_of(run_dir, earlier), Counter(_recorded(run_dir / run_folder.METRICS))
    lines = []
    for source in (JsonLines(files), EventFiles(files), CsvTables(files)):
        for row in source.rows(last=False):
            if metrics := _without(row, known):
                place = {"t": row.time_s, "step": row.step, "epoch": row.epoch}
                lines.append(json.dumps({**place, "metrics": metrics}) + "\n")
    if lines:
        text = logged.read_text(encoding="utf-8", errors="replace") if logged.exists() else ""
        write_text(logged, text[: text.rfind("\n") + 1] + "".join(lines))
    note.unlink()


def _folder(run_dir: Path) -> Path:
    return run_dir / run_folder.WORK / "node0"


def _without(row: Row, known: Counter[_Value]) -> dict[str, float]:
    """The finite metrics of a row that are not recorded; each recorded one is taken off ``known``."""
    metrics = {}
    for name, number in row.metrics.items():
        value = (row.step, row.epoch, name.rpartition("/")[2], number)
        if known[value] > 0:
            known[value] -= 1
        elif math.isfinite(number):
            metrics[name] = number
    return metrics


def _recorded(metrics: Path) -> Iterator[_Value]:
    """What metrics.jsonl holds."""
    text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.exists() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
            epoch = None if row["epoch"] is None else int(row["epoch"])
            for name, number in row["metrics"].items():
                yield int(row["step"]), epoch, name.rpartition("/")[2], float(number)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
