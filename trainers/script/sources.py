"""Where a script's metrics are found while it runs: files under {run}, rank 0's lines, the module ``paceline``."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainers.script.metrics_file import Row
from trainers.script.tensorboard import EventFile, Scalar

_LONGEST_LINE_BYTES = 1 << 20


class GrowingFile:
    """A file of lines, read from where the last look ended; half a line waits for its end."""

    def __init__(self, path: Path, start_bytes: int = 0, ends: bytes = b"\n") -> None:
        """``ends``: characters that end a line."""
        self.path, self._offset, self._rest = path, start_bytes, b""
        self._ends = re.compile(b"[" + ends + b"]")

    def lines(self) -> list[bytes]:
        """The whole lines that came since the last look. One that was cut is read from its beginning."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *whole, rest = self._ends.split(self._rest + data)
        self._rest = rest if len(rest) < _LONGEST_LINE_BYTES else b""
        return whole

    def last_line(self) -> bytes:
        """What stands behind the last line's end, when nobody writes any more."""
        rest, self._rest = self._rest, b""
        return rest


class JsonLines:
    """``*.jsonl`` under a folder: objects with ``step``, whose numbers are metrics.

    A name that another file has given already gets this file's name in front: ``val/loss`` of val.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        """What lies there already is of an earlier attempt."""
        self._folder = folder
        self._files = {path: GrowingFile(path, path.stat().st_size) for path in _regular(folder, "*.jsonl")}
        self._givers: dict[str, Path] = {}
        self.notes: dict[str, None] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        """What came since the last look; at the ``last`` one also a line without its end, if it is whole."""
        for path in _regular(self._folder, "*.jsonl"):
            file = self._files.setdefault(path, GrowingFile(path))
            for line in file.lines():
                yield from self._row(path, line, "a line of it is no JSON and was left out")
            if last:
                yield from self._row(path, file.last_line(), "its last line breaks off and was left out")

    def _row(self, path: Path, line: bytes, otherwise: str) -> Iterator[Row]:
        try:
            value = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            self.notes.setdefault(f"{path.relative_to(self._folder)}: {otherwise}")
            return
        row = row_of(value)
        if row is not None:
            named = {self._name(path, name): number for name, number in row.metrics.items()}
            yield Row(time_s=row.time_s, step=row.step, epoch=row.epoch, metrics=named)

    def _name(self, path: Path, name: str) -> str:
        first = self._givers.setdefault(name, path)
        return name if first == path else f"{path.relative_to(self._folder).with_suffix('').as_posix()}/{name}"


def _regular(folder: Path, pattern: str) -> list[Path]:
    """Files that can be read: a folder may be called so, the open of a pipe waits, and a link may lead nowhere."""
    return [path for path in sorted(folder.rglob(pattern)) if path.is_file()]


def row_of(value: Any) -> Row | None:
    """The row that an object with ``step`` is; None for anything else, and where it has no number."""
    if not isinstance(value, dict) or (step := _whole(value.get("step"))) is None:
        return None
    epoch = _whole(value.get("epoch"))
    besides = {"step"} if epoch is None else {"step", "epoch"}
    named = {name: item for name, item in value.items() if name.strip() and name not in besides}
    metrics = {name: _number(item) for name, item in named.items() if _is_number(item)}
    return Row(time_s=time.time(), step=step, epoch=epoch, metrics=metrics) if metrics else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        return float("inf")


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)


class EventFiles:
    """TensorBoard's event files under a folder. Tags of the first folder stand as they are; those of a further one
    get its name in front (``add_scalars`` and several writers make such)."""

    def __init__(self, folder: Path) -> None:
        """What lies there already is of an earlier attempt: TensorBoard never goes on with a file."""
        self._folder = folder
        self._known: dict[Path, EventFile | None] = dict.fromkeys(self._found())
        self._first: Path | None = None
        self.notes: dict[str, None] = {}

    def _found(self) -> list[Path]:
        """By name: it begins with the time at which a writer was made."""
        return sorted(_regular(self._folder, "*tfevents*"), key=lambda path: (path.name, path))

    def rows(self, *, last: bool) -> Iterator[Row]:
        """What came since the last look."""
        for path in self._found():
            file = self._known.setdefault(path, EventFile(path))
            if file is None:
                continue
            self._first = self._first or path.parent
            prefix = self._prefix(path.parent, self._first)
            for (step, _), together in itertools.groupby(file.scalars(), key=_step_and_second):
                scalars = {prefix + scalar.tag: scalar for scalar in together}
                metrics = {name: scalar.value for name, scalar in scalars.items()}
                yield Row(time_s=max(scalar.time_s for scalar in scalars.values()), step=step, metrics=metrics)
            if file.damage:
                self.notes.setdefault(f"{path.relative_to(self._folder)} is not read on: {file.damage}")

    @staticmethod
    def _prefix(folder: Path, first: Path) -> str:
        if folder == first:
            return ""
        common = os.path.commonpath([folder, first])
        return f"{folder.relative_to(common).as_posix()}/" if folder != Path(common) else f"{folder.name}/"


def _step_and_second(scalar: Scalar) -> tuple[int, int]:
    """What a writer adds one after the other for one step is one row."""
    return scalar.step, int(scalar.time_s)


class PatternLines:
    """Rank 0's lines, searched for a pattern whose named groups are metrics (``step``, ``epoch`` are what they say;
    without ``step`` the matches are counted from 1)."""

    def __init__(self, pattern: str, log_dir: Path) -> None:
        """``log_dir``: torchrun's, with a file a rank in ``*/attempt_*/<local rank>/``."""
        self._pattern, self._log_dir = re.compile(pattern), log_dir
        self._files: dict[Path, GrowingFile] = {}
        self._count = 0

    def rows(self, *, last: bool) -> Iterator[Row]:
        """What came since the last look. A progress bar's carriage return ends a line too."""
        for path in sorted(self._log_dir.glob("*/attempt_*/0/std*.log")):
            file = self._files.setdefault(path, GrowingFile(path, ends=b"\r\n"))
            for line in [*file.lines(), *([file.last_line()] if last else [])]:
                for found in self._pattern.finditer(line.decode("utf-8", "replace")):
                    yield from self._row(found.groupdict())

    def _row(self, found: dict[str, str | None]) -> Iterator[Row]:
        numbers = {name: number for name, text in found.items() if (number := _read(text)) is not None}
        step, epoch = _whole_of(numbers.pop("step", None)), _whole_of(numbers.pop("epoch", None))
        if numbers:
            self._count += 1
            yield Row(time_s=time.time(), step=self._count if step is None else step, epoch=epoch, metrics=numbers)


def _read(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None


def _whole_of(value: float | None) -> int | None:
    return None if value is None or value in (float("inf"), float("-inf")) else _whole(value)


class Logged:
    """What ``paceline.log`` and ``paceline.finish`` wrote. ``stopping``: the script has heard that it was pruned."""

    def __init__(self, path: Path, newest_step: Callable[[], int | None]) -> None:
        """``newest_step``: at which results of the whole run stand."""
        self._file, self._newest_step = GrowingFile(path), newest_step
        self.stopping = False
        self.notes: dict[str, None] = {}

    def rows(self, *, last: bool) -> Iterator[Row]:
        """What came since the last look."""
        for line in self._file.lines():
            try:
                value = json.loads(line)
            except ValueError:  # a rank was killed while it wrote, and the next one began in its line
                self.notes.setdefault("a line of paceline.log breaks off and was left out")
                continue
            self.stopping = self.stopping or "stopping" in value
            if value["metrics"]:
                of_end = value["step"] is None
                step = self._newest_step() or 0 if of_end else value["step"]
                yield Row(time_s=value["t"], step=step, metrics=value["metrics"], of_end=of_end)
