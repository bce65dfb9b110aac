"""The sources of a script's metrics while it runs: files that it writes, rank 0's lines, the module ``paceline``. Each
class is a ``Source`` of the recorder, whose ``rows`` yields what is new since the last call."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainers.script.metrics.metrics_file import Row
from trainers.script.metrics.tensorboard import EventFile

_STEPS = ("step", "global_step", "iteration", "iter")


class _MetricNames:
    """Gives metrics of several files different names: a second file's ``loss`` is ``val/loss``, for val.jsonl."""

    def __init__(self, files: WatchedFiles) -> None:
        self._files = files
        self._first_file: dict[str, Path] = {}  # name → the first file that has it

    def named(self, path: Path, metrics: Mapping[str, float]) -> dict[str, float]:
        return {self._name(path, name): number for name, number in metrics.items()}

    def _name(self, path: Path, name: str) -> str:
        first = self._first_file.setdefault(name, path)
        return name if first == path else f"{self._files.shown(path).rpartition('.')[0]}/{name}"


class JsonLines:
    """``*.jsonl``: objects with a step or an epoch, whose other numbers are metrics."""

    def __init__(self, files: WatchedFiles) -> None:
        """Skips the lines that earlier attempts left."""
        self._watched, self._names = files, _MetricNames(files)
        self._files: dict[Path, GrowingFile] = {}
        self.notes: dict[str, None] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call; at the ``last`` call also a complete line without its end."""
        for path in self._watched.matching("*.jsonl"):
            file = self._files.setdefault(path, GrowingFile(path, self._watched.earlier.get(path, 0)))
            for line in file.lines():
                yield from self._row(path, line, "a line of it is no JSON and was left out")
            if last:
                yield from self._row(path, file.last_line(), "its last line breaks off and was left out")

    def _row(self, path: Path, line: bytes, problem: str) -> Iterator[Row]:
        """Yield the row of a line, if it has one; note ``problem`` if it is no JSON."""
        try:
            value = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            self.notes.setdefault(f"{self._watched.shown(path)}: {problem}")
            return
        row = row_of(value)
        if row is not None:
            yield replace(row, metrics=self._names.named(path, row.metrics))


class CsvTables:
    """``*.csv`` with a column of steps or, as Lightning's and timm's, epochs: numbers of other columns are metrics."""

    def __init__(self, files: WatchedFiles) -> None:
        """Skips the rows that earlier attempts left."""
        self._watched, self._names = files, _MetricNames(files)
        self._tables: dict[Path, _Table] = {}
        for path in files.matching("*.csv"):
            if size := files.earlier.get(path, 0):
                for _ in self._table(path).rows(last=False, until_bytes=size):
                    pass

    def _table(self, path: Path) -> _Table:
        return self._tables.setdefault(path, _Table(path))

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call; at the ``last`` call also a row without its end."""
        for path in self._watched.matching("*.csv"):
            for cells in self._table(path).rows(last=last):
                row = _row_of_cells(cells)
                if row is not None:
                    yield replace(row, metrics=self._names.named(path, row.metrics))


class _Table:
    """One growing file. A logger with a new metric writes the file again, with another first line."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile(path)
        self._first, self._titles, self._count = b"", [""], 0  # first line, its cells, rows that were yielded

    def rows(self, *, last: bool, until_bytes: int | None = None) -> Iterator[dict[str, str]]:
        """Yield title → cell of each row since the last call, up to a position in the file."""
        first = self._first_line()
        if not first:
            return
        skipped = 0
        if first != self._first:  # a new file, or one that was written again: skip the rows that it had before
            self._first, self._titles, self._file = first, _cells(first), GrowingFile(self._path)
            skipped = 1 + self._count
        for line in [*self._file.lines(until_bytes), *([self._file.last_line()] if last else [])][skipped:]:
            cells = _cells(line)
            if cells:
                self._count += 1
                yield dict(zip(self._titles, cells, strict=False))

    def _first_line(self) -> bytes:
        with suppress(OSError), self._path.open("rb") as file:
            line = file.readline(LONGEST_LINE_BYTES)
            return line if line.endswith(b"\n") else b""
        return b""


def _cells(line: bytes) -> list[str]:
    """Return the cells; none of a line that csv refuses (a carriage return within it, a cell of more than 128 KiB)."""
    with suppress(csv.Error):
        return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r\n")]), [])
    return []


def _row_of_cells(cells: Mapping[str, str]) -> Row | None:
    return _row({name.strip(): number for name, text in cells.items() if (number := _number_in(text)) is not None})


def row_of(value: Any) -> Row | None:
    """Return the row of a JSON object, by the rules for CSV; ``{"val": {"loss": 1}}`` holds ``val/loss``. Else None."""
    if not isinstance(value, dict):
        return None
    fields = {name: item for name, item in value.items() if not isinstance(item, dict)}
    for outer, inner in value.items():
        if isinstance(inner, dict):
            fields |= {f"{outer}/{name}": item for name, item in inner.items()}
    return _row({name: _number(item) for name, item in fields.items() if _is_number(item)})


def _row(numbers: Mapping[str, float]) -> Row | None:
    """Return the row of a line's numbers; None if it has no metric, or neither a whole step nor a whole epoch."""
    metrics = {name: number for name, number in numbers.items() if name.strip()}
    names = {name.lower(): name for name in metrics}  # also Epoch, Step
    epoch = _whole(metrics.get(names.get("epoch", "")))
    if epoch is not None:  # a fraction, as transformers logs it, is a metric like others
        del metrics[names["epoch"]]
    name = next((name for name in _STEPS if name in names), None)
    step = epoch if name is None else _whole(metrics.pop(names[name]))
    return None if step is None or not metrics else Row(time_s=time.time(), step=step, epoch=epoch, metrics=metrics)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        return float("inf")


def _whole(value: object) -> int | None:
    """Return a whole number; None for anything else, also NaN and infinities (``inf // 1`` is NaN)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)


_LIGHTNINGS_PLACEHOLDER = "hp_metric"  # its TensorBoardLogger writes -1 for a script that has no metric of this name


class EventFiles:
    """TensorBoard's event files; tags in a further folder (as of ``add_scalars``) get the folder's name in front."""

    def __init__(self, files: WatchedFiles) -> None:
        """Skips the files that earlier attempts left, because TensorBoard never continues a file."""
        self._watched = files
        self._files: dict[Path, EventFile] = {}
        self._first: Path | None = None
        self.notes: dict[str, None] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call, file by file in the order of names, which begin with a writer's start."""
        for path in sorted(self._watched.matching("*tfevents*"), key=lambda path: (path.name, path)):
            if path in self._watched.earlier:
                continue
            file = self._files.setdefault(path, EventFile(path))
            self._first = self._first or path.parent
            prefix = self._prefix(path.parent, self._first)
            # a row: values that a writer adds for one step within a second
            rows = itertools.groupby(file.scalars(), key=lambda scalar: (scalar.step, int(scalar.time_s)))
            for (step, _), together in rows:
                scalars = {prefix + scalar.tag: scalar for scalar in together}
                metrics = {name: scalar.value for name, scalar in scalars.items()}
                epoch = _whole(metrics.pop("epoch", None))
                if metrics.get(_LIGHTNINGS_PLACEHOLDER) == -1:
                    del metrics[_LIGHTNINGS_PLACEHOLDER]
                time_s = max(scalar.time_s for scalar in scalars.values())
                if metrics:
                    yield Row(time_s=time_s, step=step, epoch=epoch, metrics=metrics)
            if file.damage:
                self.notes.setdefault(f"{self._watched.shown(path)} is not read on: {file.damage}")

    @staticmethod
    def _prefix(folder: Path, first: Path) -> str:
        if folder == first:
            return ""
        common = os.path.commonpath([folder, first])
        return f"{folder.relative_to(common).as_posix()}/" if folder != Path(common) else f"{folder.name}/"


class MlflowFiles:
    """The files of a script that logs to MLflow: ``EXPERIMENT/RUN/metrics/NAME``, lines of time (ms), value, step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, GrowingFile] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call; metrics of one step and time are one row."""
        metrics_at: dict[tuple[int, float], dict[str, float]] = {}
        for path in sorted(self._folder.glob("*/*/metrics/**/*")):
            name = "/".join(path.relative_to(self._folder).parts[3:])
            if not path.is_file() or name.startswith("system/"):
                continue
            for line in self._files.setdefault(path, GrowingFile(path)).lines():
                with suppress(ValueError, IndexError):
                    time_ms, value, step = line.split()[:3]
                    metrics_at.setdefault((int(step), int(time_ms) / 1000), {})[name] = float(value)
        for (at, time_s), metrics in sorted(metrics_at.items(), key=lambda item: (item[0][1], item[0][0])):
            yield Row(time_s=time_s, step=at, metrics=metrics)


class PatternLines:
    """Rank 0's lines, searched for a pattern; its groups: metrics, ``step`` (else matches are counted), ``epoch``."""

    def __init__(self, pattern: str, log_dir: Path) -> None:
        """``log_dir``: torchrun's, with a file per rank in ``*/attempt_*/<local rank>/``."""
        self._pattern, self._log_dir = re.compile(pattern), log_dir
        self._files: dict[Path, GrowingFile] = {}
        self._count = 0

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call. A progress bar's carriage return ends a line, too."""
        for path in sorted(self._log_dir.glob("*/attempt_*/0/std*.log")):
            file = self._files.setdefault(path, GrowingFile(path, ends=b"\r\n"))
            for line in [*file.lines(), *([file.last_line()] if last else [])]:
                yield from self.rows_in_line(line.decode("utf-8", "replace"), time.time())

    def rows_in_line(self, line: str, time_s: float) -> Iterator[Row]:
        for match in self._pattern.finditer(line):
            yield from self._row(match.groupdict(), time_s)

    def _row(self, groups: dict[str, str | None], time_s: float) -> Iterator[Row]:
        numbers = {name: number for name, text in groups.items() if (number := _number_in(text)) is not None}
        step, epoch = _whole(numbers.pop("step", None)), _whole(numbers.pop("epoch", None))
        if numbers:
            self._count += 1
            yield Row(time_s=time_s, step=self._count if step is None else step, epoch=epoch, metrics=numbers)


def _number_in(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None


class Logged:
    """The rows of ``paceline.log`` and ``paceline.finish``. ``was_pruned``: should_stop has told the script to stop."""

    def __init__(self, path: Path, newest_step: Callable[[], int | None]) -> None:
        """``newest_step`` returns the step at which results of the whole run are recorded."""
        self._file, self._newest_step = GrowingFile(path), newest_step
        self.was_pruned = False
        self.notes: dict[str, None] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        for line in self._file.lines():
            try:
                value = json.loads(line)
            except ValueError:  # a rank was killed while it wrote, and the next one continued its line
                self.notes.setdefault("a line of paceline.log breaks off and was left out")
                continue
            self.was_pruned = self.was_pruned or "stopping" in value
            if value["metrics"]:
                of_end = value["step"] is None
                step = self._newest_step() or 0 if of_end else value["step"]
                position = {"time_s": value["t"], "step": step, "epoch": value.get("epoch")}
                yield Row(**position, metrics=value["metrics"], of_end=of_end)


LONGEST_LINE_BYTES = 1 << 20
_PAUSE_FACTOR = 50  # pause until the next listing, in durations of the last one
_SHORT_S = 0.005  # a listing up to this duration needs no pause


class GrowingFile:
    """A file of lines that is read as it grows. An unfinished line is returned when its end has come."""

    def __init__(self, path: Path, start_bytes: int = 0, ends: bytes = b"\n") -> None:
        """``ends``: characters that end a line."""
        self.path, self._offset, self._unfinished = path, start_bytes, b""
        self._ends = re.compile(b"[" + ends + b"]")

    def lines(self, until_bytes: int | None = None) -> list[bytes]:
        """Return the complete lines since the last call, up to a position; a file that has shrunk is read anew."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._unfinished = 0, b""
                file.seek(self._offset)
                data = file.read(-1 if until_bytes is None else until_bytes - self._offset)
        except OSError:
            return []
        self._offset += len(data)
        *complete, unfinished = self._ends.split(self._unfinished + data)
        self._unfinished = unfinished if len(unfinished) < LONGEST_LINE_BYTES else b""
        return complete

    def last_line(self) -> bytes:
        """Return the last line, which has no end, when nobody writes any more."""
        line, self._unfinished = self._unfinished, b""
        return line


class WatchedFiles:
    """The files below several folders that may hold metrics: ``*.jsonl``, ``*.csv``, TensorBoard's."""

    def __init__(self, *folders: Path, earlier: Mapping[Path, int] | None = None) -> None:
        """``earlier``: bytes of each file that earlier attempts left; None: the files that exist now."""
        self._folders = [folder for folder in folders if not any(folder in other.parents for other in folders)]
        self._paths: list[Path] = []
        self._next_s = 0.0
        self.refresh()
        self.earlier = {path: path.stat().st_size for path in self.matching("*")} if earlier is None else earlier

    def refresh(self, *, last: bool = False) -> None:
        """List the files again, unless that takes long and was done recently; ``last``: in any case."""
        began_s = time.monotonic()
        if last or began_s >= self._next_s:
            self._paths = sorted(path for folder in self._folders for path in _metric_files(folder))
            took_s = time.monotonic() - began_s
            self._next_s = began_s + (_PAUSE_FACTOR * took_s if took_s > _SHORT_S else 0.0)

    def matching(self, pattern: str) -> list[Path]:
        """Return the regular files whose names match. Others are left out: opening a pipe would block."""
        return [path for path in self._paths if fnmatch(path.name, pattern) and path.is_file()]

    def shown(self, path: Path) -> str:
        return next(path.relative_to(folder).as_posix() for folder in self._folders if path.is_relative_to(folder))


def _metric_files(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        yield from (Path(top, name) for name in names if name.endswith((".jsonl", ".csv")) or "tfevents" in name)
